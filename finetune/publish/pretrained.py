"""A finished pretraining run as a folder to publish: bfloat16 weights, tokenizer, model card.

    python -m finetune.publish.pretrained --run runs/NAME --output FOLDER --text 'English Wikipedia'

The card is made from the run's own files: settings, tokens, held-out loss, machine, commit.
`hf upload` sends such a folder to the hub.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoConfig

import roformer
from finetune.publish.model_card import render_card
from train.atomic_dir import check_writable, write_dir_atomically
from train.command_line import run_command
from train.data.vocabulary import load_tokenizer
from train.loop.language_model import auto_model_class, input_errors
from train.loop.run_log import read_log
from train.loop.run_metadata import read_metadata
from train.settings import InputError


@dataclass(frozen=True)
class PublishSettings:
    """Make a folder of a finished run that others can load."""

    run: str
    """Run folder, with model/, settings.yaml and log.jsonl."""
    output: str
    """Folder to make."""
    text: str
    """Description of the training text, for the card."""
    licence: str = "unknown"
    """Licence of the weights by its name on the hub."""
    language: str | None = None
    """Language of the text by its code on the hub, such as en."""

    def __post_init__(self) -> None:
        if Path(self.output).exists():
            raise InputError(f"output must be new, got {self.output}; delete it or choose another")
        check_writable(Path(self.output).parent, "output")


def main(settings: PublishSettings) -> Path:
    """Write the folder and print its size.

    Raises:
        InputError: The run is not finished, or the folder exists.
    """
    roformer.use_for_auto_classes()
    transformers.utils.logging.disable_progress_bar()
    run = Path(settings.run)
    needed = ("model/tokenizer_config.json", "settings.yaml", "environment.json", "log.jsonl")
    missing = [name for name in needed if not (run / name).is_file()]
    if not any("validation_loss" in row for row in read_log(run / "log.jsonl")):
        missing.append("an evaluation in log.jsonl")
    if missing:
        raise InputError(
            f"run must be the folder of a finished run, got {run} without {missing}; let it end"
        )
    with input_errors(f"run {run}"):
        config = AutoConfig.from_pretrained(run / "model")
        model = auto_model_class(config).from_pretrained(run / "model", dtype=torch.bfloat16)
    tokenizer = load_tokenizer(str(run / "model"), "run")
    output = Path(settings.output)
    with write_dir_atomically(output) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        saved = json.loads((unfinished / "config.json").read_text())
        card = pretrained_card(settings, saved, model.num_parameters(), tokenizer)
        card.save(unfinished / "README.md")
    size = sum(file.stat().st_size for file in output.iterdir())
    print(f"{output}: {model.num_parameters():,} parameters, {size / 1e6:.1f} MB")
    return output


def pretrained_card(
    settings: PublishSettings, config: dict[str, Any], parameters: int, tokenizer: Any
) -> ModelCard:
    """The card of a pretrained model.

    `config` is the saved config.json: a run started from another model takes over fields that its
    settings do not contain.
    """
    folder = Path(settings.run)
    log = read_log(folder / "log.jsonl")
    causal = bool(config.get("is_decoder"))
    data = ModelCardData(
        language=settings.language,
        license=settings.licence,
        library_name="transformers",
        pipeline_tag="text-generation" if causal else "fill-mask",
        tags=[config["model_type"], "causal-lm" if causal else "masked-lm"],
    )
    rates = [config[name] for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")]
    return render_card(
        "pretrained.md.j2",
        data,
        title=Path(settings.output).name,
        config=config,
        settings=read_metadata(folder / "settings.yaml"),
        parameters=parameters,
        causal=causal,
        mask_token=tokenizer.mask_token,
        cls_token=tokenizer.cls_token,
        language=settings.language,
        dropout=dict.fromkeys(f"{rate:g}" for rate in rates),  # once if they are equal
        text=settings.text,
        machine=read_metadata(folder / "environment.json"),
        end=[row for row in log if "validation_loss" in row][-1],
        training_loss=[row["loss"] for row in log if "loss" in row][-1],
        # with comments on what changed during the run
        yaml_settings=(folder / "settings.yaml").read_text().strip(),
    )


if __name__ == "__main__":
    run_command(main, PublishSettings)
