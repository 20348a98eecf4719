"""Model folders for publication: a fine-tuned model with its tokenizer and its model card.

A card contains what the result contains. Data with rows missing keep their own label
and get no metadata by which the hub would rank them. `hf upload` sends a folder.
"""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError

from finetune.results import RECIPE_FIELDS, Result, run_name
from finetune.shared_head import ENCODER, HEAD_FILES
from finetune.tasks import HUB_DATA, METRIC_NAMES, TASKS, recorded_task
from train.atomic_dir import check_writable, write_dir_atomically
from train.settings import InputError, require

TEMPLATES = Path(__file__).parent / "templates"
MARK = "<!-- written by finetune/publish/model_card.py -->"
EXAMPLE = ("A man is playing a guitar.", "Somebody makes music.")
MODEL_FILES = (
    "README.md", "config.json", "generation_config.json", "model.safetensors",
    "model-*-of-*.safetensors", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "vocab.txt", "merges.txt", "*.model", ENCODER, *HEAD_FILES,
)  # fmt: skip
"""Names of the files of a saved model; a folder with any other file is never replaced."""


def save_model(folder: str, model: Any, tokenizer: Any, result: Result) -> None:
    """Write model, tokenizer and card, completely or not at all; an earlier save is replaced.

    `result` is the run's, with scores.

    Raises:
        InputError: The folder holds something else, or cannot be written.
    """
    check_save_folder(folder)
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


def check_save_folder(folder: str) -> None:
    """Refuse to save over anything but an earlier save.

    Raises:
        InputError: The folder holds something else, or could not be made.
    """
    path = Path(folder)
    if not path.exists():
        check_writable(path.parent, "save")
        return
    require(path.is_dir(), "save", "must name a folder", f"the file {folder}", "choose another")
    names = sorted(entry.name for entry in path.iterdir())
    foreign = [x for x in names if not any(fnmatch(x, pattern) for pattern in MODEL_FILES)]
    card = path / "README.md"
    ours = card.is_file() and MARK in card.read_text(encoding="utf-8", errors="replace")
    found = f"{folder} with {(foreign or names or [''])[0]}"
    rule = "must name a new folder or one that holds only an earlier save"
    require(not names or (ours and not foreign), "save", rule, found, "choose another")


def render_card(template: str, data: ModelCardData, **values: Any) -> ModelCard:
    """Render a model card: the metadata for the hub, then a file of templates/ with its values."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(template).render(values)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")


def finetuned_card(result: Result, model_type: str) -> ModelCard:
    """The card of a run; `model_type` is that of the saved config.json, which may be another."""
    task = recorded_task(result)
    facts = {name: result[name] for name in ("seed", *RECIPE_FIELDS)}
    facts |= {name: result[name] for name in ("precision", "device", "processes", "seconds")}
    facts |= {"tokenizer": result["tokenizer"] or "the model's", "training loss": result["loss"]}
    value = "a value from {:g} to {:g}".format(*task.value_range) if task.value_range else "a value"
    answers = ", ".join(f"{index} {name}" for index, name in enumerate(task.labels or ()))
    return render_card(
        "finetuned.md.j2",
        finetuned_card_data(result),
        title=_title(result),
        run=result,
        task=task,
        answers=answers or value,
        metrics={name: METRIC_NAMES[name][1] for name in task.metrics},
        model_type=model_type,
        example=EXAMPLE,
        facts=facts | result["versions"],
        hub_data=HUB_DATA,
        mark=MARK,
    )


def finetuned_card_data(result: Result) -> ModelCardData:
    """The card's metadata; GLUE is named in it only for the official rows."""
    official = result["official"]
    tags = [result["model_type"]]
    tags += [tag for tag in ("collapsed", "random_weights") if result[tag]]
    return ModelCardData(
        language="en" if result["task"] in TASKS else None,
        license="unknown",  # of the weights; the text says what is known
        library_name="transformers" if result["pooling"] == "own" else None,
        pipeline_tag="text-classification",
        base_model=result["model"] if _is_on_hub(result) else None,
        datasets=[HUB_DATA] if official else None,
        tags=[*tags, "glue"] if official else tags,
        metrics=[METRIC_NAMES[name][0] for name in recorded_task(result).metrics],
        model_name=_title(result),
        eval_results=[
            EvalResult(
                task_type="text-classification",
                dataset_type=HUB_DATA if official else result["label"],
                dataset_name=f"glue/{result['task']}" if official else result["label"],
                dataset_config=result["task"] if official else None,
                dataset_split=split,
                metric_type=METRIC_NAMES[name][0],
                metric_value=value,
                metric_name=f"{METRIC_NAMES[name][1]}, development set",
            )
            for split, values in result["metrics"].items()
            for name, value in values.items()
        ],
    )


def _title(result: Result) -> str:
    return run_name(result).rpartition("-")[0]


def _is_on_hub(result: Result) -> bool:
    """Whether the weights come from a model of the hub."""
    try:
        validate_repo_id(result["model"])
    except HFValidationError:
        return False
    return not result["random_weights"] and not Path(result["model"]).exists()
