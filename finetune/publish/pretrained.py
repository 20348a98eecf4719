"""A finished run as a folder to give away: weights in half the bytes, tokenizer, model card.

    python -m finetune.publish.pretrained --run runs/NAME --output FOLDER --text 'English Wikipedia'

The card says what the run's own files say: settings, tokens, held-out loss, machine, commit.
`finetune.publish.model_card` sends such a folder to the hub.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoConfig, AutoTokenizer

import roformer
from train.analysis.loss_curves import Run, read_log
from train.loop.atomic_dir import write_dir_atomically
from train.loop.launch import run_command
from train.loop.model_init import auto_model_class
from train.settings import require

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
EXAMPLE = "The capital of France is {mask}."


@dataclass(frozen=True)
class PublishSettings:
    """Make a folder of a finished run that others can load."""

    run: str
    """Run folder, with model/, settings.yaml and log.jsonl."""
    output: str
    """Folder to make."""
    text: str
    """What the model was trained on, in words, for the card."""
    licence: str = "unknown"
    """Licence of the weights by its name on the hub."""
    language: str | None = None
    """Language of the text by its code on the hub, such as en."""
    dtype: str = "bfloat16"
    """Of the saved weights: bfloat16 or float32."""

    def __post_init__(self) -> None:
        known = self.dtype in DTYPES
        require(
            known, "dtype", f"must be one of {', '.join(DTYPES)}", repr(self.dtype), "see --help"
        )
        free = not Path(self.output).exists()
        require(free, "output", "must be new", self.output, "delete it or choose another")


def main(settings: PublishSettings) -> Path:
    """Write the folder and say how large it is.

    Raises:
        InputError: The run is not finished, or the folder is there.
    """
    roformer.use_for_auto_classes()
    transformers.utils.logging.disable_progress_bar()
    source = Path(settings.run) / "model"
    needed = ("model/tokenizer_config.json", "settings.yaml", "environment.json", "log.jsonl")
    missing = [name for name in needed if not (source.parent / name).is_file()]
    rule, found = "must be the folder of a finished run", f"{settings.run} without {missing}"
    require(not missing, "run", rule, found, "let it end")
    config = AutoConfig.from_pretrained(source)
    model = auto_model_class(config).from_pretrained(source, dtype=DTYPES[settings.dtype])
    tokenizer = AutoTokenizer.from_pretrained(source)
    output = Path(settings.output)
    with write_dir_atomically(output) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        count = model.num_parameters()
        example = EXAMPLE.format(mask=tokenizer.mask_token)
        saved = json.loads((unfinished / "config.json").read_text())
        card(settings, saved, count, example).save(unfinished / "README.md")
    size = sum(file.stat().st_size for file in output.iterdir())
    print(f"{output}: {count:,} parameters, {size / 1e6:.1f} MB")
    return output


def card(
    settings: PublishSettings, config: dict[str, Any], parameters: int, example: str
) -> ModelCard:
    """The model card of a run.

    Args:
        settings: What is said of text and licence, and where the run is.
        config: Of the model, as saved: what a run started from another model takes over is here
            and not in its settings.
        parameters: How many.
        example: A sentence with a mask.
    """
    folder = Path(settings.run)
    made = yaml.safe_load((folder / "settings.yaml").read_text())
    machine = json.loads((folder / "environment.json").read_text())
    log = read_log(settings.run)
    kind, causal = config["model_type"], bool(config.get("is_decoder"))
    data = ModelCardData(
        language=settings.language,
        license=settings.licence,
        library_name="transformers",
        pipeline_tag="text-generation" if causal else "fill-mask",
        tags=[kind, "causal-lm" if causal else "masked-lm"],
    )
    title = Path(settings.output).name
    sections = [
        f"# {title}",
        _what(config, parameters, made["model"]["init"], causal),
        "## Use",
        f"```python\n{_code(kind, example, causal)}\n```",
        _classes(kind),
        _further(settings.dtype, config),
        "## Training",
        f"Text: {settings.text}.",
        _table(_facts(made, machine, log, causal)),
        "All of its settings:",
        f"```yaml\n{yaml.safe_dump(made, sort_keys=False).strip()}\n```",
        "## Limits",
        "It knows what is in its text and no more, and repeats what is there, prejudices included. "
        "Small models that have read little are for comparing, not for using.",
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")


def _what(config: dict[str, Any], parameters: int, init: str | None, causal: bool) -> str:
    kind = config["model_type"]
    size = f" of {config['num_hidden_layers']} layers and width {config['hidden_size']}"
    names = {"roformer": "RoFormer", "roformer_plus": "RoFormer", "bert": "BERT"}
    source = " (Su et al. 2021, arXiv:2104.09864)" if "roformer" in kind else ""
    name = names.get(kind, kind)
    how = "to predict the next token" if causal else "with masked language modelling"
    start = "random weights" if init is None else f"`{init}`"
    return f"A {name}{source}{size}, {parameters:,} parameters, pretrained {how} from {start}."


def _code(kind: str, example: str, causal: bool) -> str:
    ours = "import roformer  # knows roformer_plus\n" if kind == "roformer_plus" else ""
    if causal:
        return (
            f"{ours}from transformers import pipeline\n\n"
            'write = pipeline("text-generation", model=".")  # this folder, or its hub id\n'
            'print(write("The ")[0]["generated_text"])'
        )
    return (
        f"{ours}from transformers import pipeline\n\n"
        'fill = pipeline("fill-mask", model=".")  # this folder, or its hub id\n'
        f'print(fill("{example}")[0]["token_str"])'
    )


def _classes(kind: str) -> str:
    if "roformer" not in kind:
        return "transformers' own class; nothing else is needed."
    if kind == "roformer_plus":
        return "Settings that transformers' own RoFormer lacks: it needs `import roformer`."
    return (
        "`roformer.RoFormerForMaskedLM.from_pretrained` loads the same folder without a limit of "
        "length, and faster; transformers' own RoFormer gives the same scores."
    )


def _further(dtype: str, config: dict[str, Any]) -> str:
    """What someone who trains on must know, because from_pretrained says none of it."""
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    rates = dict.fromkeys(config[name] for name in names)  # once, where they are the same
    dropout = (
        "The configuration has the dropout of pretraining, "
        f"{' and '.join(f'{value:g}' for value in rates)}; `from_pretrained` takes another as "
        "`hidden_dropout_prob=...` and `attention_probs_dropout_prob=...`."
    )
    if dtype == "float32":
        return dropout
    return (
        f"The weights are {dtype}, and transformers loads them so: to train them further, give "
        f"`from_pretrained` `dtype=torch.float32`. {dropout}"
    )


def _facts(
    made: dict[str, Any], machine: dict[str, Any], log: Run, causal: bool
) -> list[tuple[str, str]]:
    what = "next token" if causal else "15 % masked"
    end, last = log.held_out[-1], log.training[-1]
    return [
        ("steps", f"{end['step']:,}"),
        ("tokens", f"{end['tokens']:,}"),
        (f"held-out loss, {what}", f"{end['validation_loss']:.3f} nats a predicted token"),
        ("held-out accuracy", f"{100 * end['validation_accuracy']:.1f} %"),
        ("training loss at the end", f"{last['loss']:.3f}"),
        ("seed", str(made["run"]["seed"])),
        ("hours", f"{end['seconds'] / 3600:.1f}"),
        ("machine", f"{machine['machine']}, {machine['precision']}, threads {machine['threads']}"),
        ("versions", f"torch {machine['torch']}, transformers {machine['transformers']}"),
        ("commit", str(machine["commit"])),
    ]


def _table(facts: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts)])


if __name__ == "__main__":
    run_command(main, PublishSettings)
