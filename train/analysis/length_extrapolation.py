"""Masked-LM loss at lengths beyond those of training, on the same text at every length.

    python -m train.analysis.length_extrapolation --models '[runs/a/model]' --corpus.validation TEXT

A model with a table of positions is refused beyond its end. A model with rotary embeddings and
softmax attention is measured unchanged, and with two rescalings for s = L / L_trained: positions
divided by s (linear interpolation, Chen et al. 2023, arXiv:2306.15595), and theta multiplied by
s^(d / (d - 2)), which divides the lowest frequency by s and keeps the highest ("NTK-aware").
Nothing is trained.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from accelerate import Accelerator
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from train.command_line import run_command
from train.data import vocabulary
from train.data.batching import SequenceIndex
from train.data.corpus import tokenize_corpus
from train.data.vocabulary import Vocab
from train.loop.evaluate import evaluate, load_language_model
from train.loop.language_model import check_length, has_plain_rope, load_config
from train.loop.launch import start_accelerator
from train.plotting import COLORS, check_figure_path, make_axes, save_figure
from train.run_names import find_folders, model_and_seed
from train.settings import InputError, TextSettings, check_fields
from train.tables import markdown_table

Row = dict[str, Any]

TOKENS_PER_BATCH = 4096


@dataclass(frozen=True)
class LengthSettings:
    """Measure masked-LM loss against length."""

    models: list[str]
    """Model folders of runs or globs, as [runs/a-0/model, runs/b-0/model]; `-0`, `-1` are seeds."""
    corpus: TextSettings = field(default_factory=TextSettings)
    lengths: list[int] = field(default_factory=lambda: [128, 256, 512, 1024, 2048])
    """Sequence lengths in tokens, special tokens included."""
    trained: int = 128
    """Longest sequence of pretraining."""
    documents: int = 100
    """Held-out documents to read, of those that fill the longest sequence."""
    output: str = "runs/lengths.png"
    """Figure to write; table and numbers are written beside it as .md and .json."""

    def __post_init__(self) -> None:
        if not self.models:
            raise InputError("models must name a folder, got none; write [runs/a-0/model]")
        rule = "must be at least 8"
        check_fields(self, lambda x: min(x, default=0) >= 8, rule, "lengths")
        check_fields(self, lambda length: length >= 8, rule, "trained")
        check_fields(self, lambda x: x >= 1, "must be at least 1", "documents")
        check_figure_path(self.output)


def main(settings: LengthSettings) -> None:
    """Measure every model at every length, write figure and numbers, print a table."""
    accelerator = start_accelerator()
    folders = find_folders(settings.models, "models").values()
    rows = [row for folder in folders for row in measure(folder, settings, accelerator)]
    if accelerator.is_main_process:
        output, table = Path(settings.output), format_table(rows)
        plot(rows, settings.trained, output)
        output.with_suffix(".md").write_text(table + "\n")
        output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        print(table)
        print(f"figure: {output}")


def measure(folder: str, settings: LengthSettings, accelerator: Accelerator) -> Iterator[Row]:
    """Evaluate a model at every length, unchanged and rescaled.

    Yields:
        `model`, `seed`, `way` (the rescaling) and `length`, with the results of `evaluate` and the
        number of `sequences`, or with the reason why the model is `refused`.
    """
    model, seed = model_and_seed(folder)
    tokenizer = vocabulary.load_tokenizer(folder, key="models")
    config = load_config(folder, key="models")
    with accelerator.local_main_process_first():
        store = tokenize_corpus(settings.corpus, "validation", tokenizer)
    for length in settings.lengths:
        for way, changes in rescalings(config, length / settings.trained).items():
            row = {"model": model, "seed": seed, "way": way, "length": length}
            try:
                check_length(config, length, key="length")
            except InputError as error:
                yield row | {"refused": str(error)}
                continue
            language_model = load_language_model(folder, tokenizer, length, "eager", changes)
            language_model = accelerator.prepare_model(language_model, evaluation_mode=True)
            sequences, batch = SequenceIndex(store, length), max(1, TOKENS_PER_BATCH // length)
            sequence_ids = select_sequences(sequences, max(settings.lengths), settings.documents)
            vocab = Vocab.from_tokenizer(tokenizer)
            scores = evaluate(language_model, sequences, vocab, accelerator, batch, sequence_ids)
            accelerator.free_memory()  # it keeps a reference to every model that it has prepared
            yield row | scores | {"sequences": len(sequence_ids)}


def rescalings(config: PreTrainedConfig, scale: float) -> dict[str, dict[str, Any]]:
    """Return the configuration fields that each rescaling by s = `scale` changes, by its name.

    The first changes nothing. Only rotary embeddings of softmax attention are rescaled, and only
    for s above 1.
    """
    found: dict[str, dict[str, Any]] = {"as it is": {}}
    if has_plain_rope(config) and scale > 1:
        rope, d = config.rope_parameters, config.rotary_dim
        linear = rope | {"rope_type": "linear", "factor": scale}
        found["positions / s"] = {"rope_parameters": linear}
        if d > 2:  # one frequency does not depend on theta
            theta = rope["rope_theta"] * scale ** (d / (d - 2))
            found["theta rescaled"] = {"rope_parameters": rope | {"rope_theta": theta}}
    return found


def select_sequences(sequences: SequenceIndex, longest: int, documents: int) -> NDArray[np.int64]:
    """Select full sequences [n] inside the first `longest` tokens of the first long documents.

    Every length is so measured on the same text, except for a remainder at its end. Special tokens
    count in `longest`.

    Raises:
        InputError: No document is long enough.
    """
    tokens_needed = longest - 2
    ends = sequences.store.document_ends
    starts = np.concatenate([[0], ends[:-1]])
    long = np.flatnonzero(ends - starts >= tokens_needed)[:documents]
    if len(long) == 0:
        raise InputError(
            f"corpus.validation must hold a document of {tokens_needed} tokens, got none; "
            "give longer texts or lower lengths"
        )
    start, tokens = sequences.locate(np.arange(len(sequences)))
    document = np.searchsorted(ends, start, side="right")
    inside = start + tokens - starts[document] <= tokens_needed
    return np.flatnonzero((tokens == sequences.length - 2) & inside & np.isin(document, long))


def mean_losses(rows: list[Row]) -> pd.DataFrame:
    """Mean, min and max over seeds by (model, way, length); NaN where the model was refused."""
    frame = pd.DataFrame(rows).reindex(columns=["model", "way", "length", "validation_loss"])
    groups = frame.groupby(["model", "way", "length"], sort=False)["validation_loss"]
    return groups.agg(["mean", "min", "max"])


def format_table(rows: list[Row]) -> str:
    """Format a Markdown table: a row for each model and rescaling, mean and range over seeds."""
    cells: dict[str, dict[str, str]] = {}
    for (model, way, length), loss in mean_losses(rows).iterrows():
        spread = f" ({loss['min']:.3f} to {loss['max']:.3f})" if loss["min"] < loss["max"] else ""
        cell = "refused" if np.isnan(loss["mean"]) else f"{loss['mean']:.3f}{spread}"
        cells.setdefault(f"{model}, {way}", {})[str(length)] = cell
    frame = pd.DataFrame.from_dict(cells, orient="index").fillna("–")  # noqa: RUF001 an empty cell
    return markdown_table(frame.rename_axis("model").reset_index())


def plot(rows: list[Row], trained: int, output: Path) -> None:
    """Plot loss against length: a color for each model, a line style for each rescaling.

    The line of a model with a table of positions ends where that ends.
    """
    figure, (axis,) = make_axes(1, 1, 9.5, 4.6)
    losses = mean_losses(rows)
    lengths = sorted({row["length"] for row in rows})
    models, ways = (losses.index.unique(level) for level in ("model", "way"))
    colors = dict(zip(models, COLORS * len(models)))
    styles = dict(zip(ways, ("-", "--", ":")))
    for (model, way), part in losses.groupby(["model", "way"], sort=False):
        x, color = part.index.get_level_values("length"), colors[model]
        style = {"color": color, "linestyle": styles[way], "label": f"{model}, {way}"}
        axis.plot(x, part["mean"], marker="o", markersize=4, **style)
        axis.fill_between(x, part["min"], part["max"], color=color, alpha=0.15)
    axis.axvline(trained, color="black", linewidth=0.8, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.set_xlabel(f"length in tokens; trained up to {trained}")
    axis.set_ylabel("held-out loss (nats a predicted token)")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    save_figure(figure, output)


if __name__ == "__main__":
    run_command(main, LengthSettings)
