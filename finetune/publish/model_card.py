"""Model folders for publication: a fine-tuned model with its tokenizer and its model card.

A card contains what the result contains. Data with rows missing keep their own label
and get no metadata by which the hub would rank them. `hf upload` sends a folder.
"""

import json
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import SafetensorError

from finetune.results import PROTOCOL_FIELDS, Result, run_name
from finetune.tasks import HUB_DATA, METRIC_NAMES, TASKS, recorded_task
from train.atomic_dir import write_dir_atomically
from train.settings import InputError

TEMPLATES = Path(__file__).parent / "templates"
EXAMPLE = ("A man is playing a guitar.", "Somebody makes music.")


def save_with_card(folder: str, model: Any, tokenizer: Any, result: Result) -> None:
    """Write model, tokenizer and card, completely or not at all.

    `folder` must not exist; what killed processes left is deleted. `result` is the run's, with
    scores.

    Raises:
        InputError: The folder cannot be written.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # the settings of the last batch do not belong to the tokenizer
        backend.no_truncation()
        backend.no_padding()
    try:
        with write_dir_atomically(Path(folder), replace=True) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            (config,) = unfinished.rglob("config.json")  # of the encoder, with a shared head
            model_type = json.loads(config.read_text(encoding="utf-8"))["model_type"]
            finetuned_card(result, model_type).save(unfinished / "README.md")
    except (OSError, SafetensorError) as error:
        raise InputError(f"save must name a folder that can be written, got {error}") from error


def render_card(template: str, data: ModelCardData, **values: Any) -> ModelCard:
    """Render a model card: the metadata for the hub, then a file of templates/ with its values."""
    text = jinja2.Template(
        (TEMPLATES / template).read_text(encoding="utf-8"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).render(values)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")


def finetuned_card(result: Result, model_type: str) -> ModelCard:
    """The card of a run; `model_type` is that of the saved config.json, which may be another."""
    task = recorded_task(result)
    facts = {name: result[name] for name in ("seed", *PROTOCOL_FIELDS)}
    facts |= {name: result[name] for name in ("precision", "device", "processes", "seconds")}
    facts |= {"tokenizer": result["tokenizer"] or "the model's", "training loss": result["loss"]}
    value = "a value from {:g} to {:g}".format(*task.value_range) if task.value_range else "a value"
    answers = ", ".join(f"{index} {name}" for index, name in enumerate(task.labels or ()))
    data = finetuned_card_data(result)
    return render_card(
        "finetuned.md.j2",
        data,
        title=data.model_name,
        run=result,
        task=task,
        answers=answers or value,
        metrics={name: METRIC_NAMES[name][1] for name in task.metrics},
        model_type=model_type,
        example=EXAMPLE,
        facts=facts | result["versions"],
        hub_data=HUB_DATA,
    )


def finetuned_card_data(result: Result) -> ModelCardData:
    """The card's metadata; GLUE is named in it only for the official rows."""
    official = result["official"]
    is_on_hub = not (result["random_weights"] or Path(result["model"]).exists())
    tags = [result["model_type"]]
    tags += [tag for tag in ("collapsed", "random_weights") if result[tag]]
    return ModelCardData(
        language="en" if result["task"] in TASKS else None,
        license="unknown",  # of the weights; the text says what is known
        library_name="transformers" if result["pooling"] == "own" else None,
        pipeline_tag="text-classification",
        base_model=result["model"] if is_on_hub else None,
        datasets=[HUB_DATA] if official else None,
        tags=[*tags, "glue"] if official else tags,
        metrics=[METRIC_NAMES[name][0] for name in recorded_task(result).metrics],
        model_name=run_name(result).rpartition("-")[0],
        eval_results=[
            EvalResult(
                task_type="text-classification",
                dataset_type=HUB_DATA if official else result["dataset"],
                dataset_name=f"glue/{result['task']}" if official else result["dataset"],
                dataset_config=result["task"] if official else None,
                dataset_split=split,
                metric_type=METRIC_NAMES[name][0],
                metric_value=value,
                metric_name=f"{METRIC_NAMES[name][1]}, validation split",
            )
            for split, values in result["metrics"].items()
            for name, value in values.items()
        ],
    )
