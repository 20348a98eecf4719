"""Masked-LM loss beyond the length a model was trained at, over one text at every length.

    python -m train.analysis.length_extrapolation --models '[runs/a/model]' --corpus.validation TEXT

A table of positions ends somewhere, and a model that has one is refused beyond it; a rotation goes
on. A RoFormer is measured three times: as it is; with its positions divided by s = L / L_trained
(Chen et al. 2023, arXiv:2306.15595, linear interpolation); and with theta multiplied by
s^(d / (d - 2)), which divides the slowest angle by s and leaves the fastest as it is ("NTK-aware"
rescaling). Nothing is trained here.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from accelerate import Accelerator
from numpy.typing import NDArray
from transformers import PreTrainedConfig

import roformer
from train.analysis.loss_curves import by_model
from train.analysis.plotting import COLOURS, check_figure_path, make_axes, save_figure
from train.data import vocabulary
from train.data.batching import SequenceIndex
from train.data.corpus import tokenize_corpus
from train.data.masking import Vocab
from train.loop.atomic_dir import model_name
from train.loop.evaluate import evaluate, load_language_model
from train.loop.launch import run_command, start_accelerator
from train.loop.model_init import load_config
from train.settings import HeldOutSettings, InputError, require

PLAIN = "as it is"
REFUSED = "refused, its table of positions has ended"
TOKENS = 4096
"""Most tokens a forward pass."""


@dataclass(frozen=True)
class LengthsSettings:
    """Measure masked-LM loss against length."""

    models: list[str]
    """Model folders of runs, as [runs/a-0/model, runs/b-0/model]; `-0`, `-1` are seeds."""
    corpus: HeldOutSettings = field(default_factory=HeldOutSettings)
    lengths: list[int] = field(default_factory=lambda: [128, 256, 512, 1024, 2048])
    """Tokens a sequence, special ones included."""
    trained: int = 128
    """Longest sequence of pretraining."""
    documents: int = 100
    """Held-out documents to read, of those that fill the longest sequence."""
    attention: str = "eager"
    """Attention kernel by transformers' name."""
    output: str = "results/lengths.png"
    """Picture to write; the numbers go beside it, ending in .json."""

    def __post_init__(self) -> None:
        for length in self.lengths:
            require(length >= 8, "lengths", "must be at least 8", length, "128 is usual")
        require(self.trained >= 8, "trained", "must be at least 8", self.trained, "128 is usual")
        require(self.documents >= 1, "documents", "must be at least 1", self.documents, "use 100")
        require(len(self.models) > 0, "models", "must name a folder", "none", "give one")
        check_figure_path(self.output)


def main(settings: LengthsSettings) -> list[dict[str, Any]]:
    """Measure every model at every length in every way, draw, write, print a table."""
    roformer.use_for_auto_classes()
    transformers.utils.logging.disable_progress_bar()
    accelerator = start_accelerator()
    folders = {model_name(folder): folder for folder in settings.models}
    models = by_model([model_name(folder) for folder in settings.models])
    rows = [
        {"model": model, "seed": seed} | row
        for model, seeds in models.items()
        for seed, name in seeds.items()
        for row in rows_of(folders[name], settings, accelerator)
    ]
    if accelerator.is_main_process:
        output = Path(settings.output)
        draw(rows, settings)
        output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        print(table(rows, settings.lengths))
        print(f"picture: {output}")
    return rows


def rows_of(
    folder: str, settings: LengthsSettings, accelerator: Accelerator
) -> Iterator[dict[str, Any]]:
    """What one model does at each length, or why it cannot.

    Yields:
        way, length; and the scores of `validate.evaluate` with the number of sequences read, or
        `refused` with the reason.
    """
    tokenizer, config = (
        vocabulary.load_tokenizer(folder, key="models"),
        load_config(folder, key="models"),
    )
    with accelerator.local_main_process_first():
        store = tokenize_corpus(settings.corpus, "validation", tokenizer)
    for length in settings.lengths:
        for way, changes in ways(config, length / settings.trained).items():
            head = {"way": way, "length": length}
            try:
                objective = load_language_model(
                    folder, tokenizer, length, settings.attention, changes
                )
            except InputError as error:
                if not str(error).startswith("length "):
                    raise
                yield head | {"refused": str(error)}
                continue
            objective = accelerator.prepare_model(objective, evaluation_mode=True)
            sequences, batch = SequenceIndex(store, length), max(1, TOKENS // length)
            chosen = same_text(sequences, max(settings.lengths), settings.documents)
            vocab = Vocab.from_tokenizer(tokenizer)
            scores = evaluate(objective, sequences, vocab, accelerator, batch, chosen)
            accelerator.free_memory()  # which keeps every model that it has prepared
            yield head | scores | {"sequences": len(chosen)}


def ways(config: PreTrainedConfig, factor: float) -> dict[str, dict[str, Any]]:
    """Changes of the configuration for a text `factor` times as long as those of training.

    Args:
        config: Of the model; only one that rotates has something to change.
        factor: s = L / L_trained; only above 1 there is something to change.
    """
    rope = getattr(config, "rope_parameters", None)
    if rope is None or rope["rope_type"] != "default" or factor <= 1:
        return {PLAIN: {}}
    if getattr(config, "position_encoding", "rope") != "rope":
        return {PLAIN: {}}
    found: dict[str, dict[str, Any]] = {PLAIN: {}}
    random = getattr(config, "linear_attention", None) == "favor"  # features of one type alone
    if not random:
        linear = rope | {"rope_type": "linear", "factor": factor}
        found["positions / s"] = {"rope_parameters": linear}
    d = config.rotary_dim
    if d > 2:  # a single pair turns by one radian a token whatever theta is
        theta = rope["rope_theta"] * factor ** (d / (d - 2))
        found["theta rescaled"] = {"rope_parameters": rope | {"rope_theta": theta}}
    return found


def same_text(sequences: SequenceIndex, longest: int, documents: int) -> NDArray[np.int64]:
    """Numbers of the sequences that fill the length, inside the start of long documents.

    The start is as long as the longest sequence to be measured, so that every length is measured on
    the same text but for what is left over at its end.

    Args:
        sequences: Cut at the length to measure.
        longest: The longest to be measured, special tokens included.
        documents: Most documents to read.

    Raises:
        InputError: No document is that long.
    """
    most = longest - 2
    ends = sequences.store.document_ends
    begins = np.concatenate([[0], ends[:-1]])
    long = np.flatnonzero(ends - begins >= most)[:documents]
    rule = f"must hold a document of {most} tokens"
    require(len(long) > 0, "corpus.validation", rule, "none", "give longer texts or lower lengths")
    start, tokens = sequences.spans(np.arange(len(sequences)))
    document = np.searchsorted(ends, start, side="right")
    inside = start + tokens - begins[document] <= most
    return np.flatnonzero((tokens == sequences.length - 2) & inside & np.isin(document, long))


def means(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[int, list[float]]]:
    """(model, way) -> length -> loss of each seed; no seed where it was refused."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in rows:
        losses = found.setdefault((row["model"], row["way"]), {}).setdefault(row["length"], [])
        losses += [row["validation_loss"]] if "validation_loss" in row else []
    return found


def table(rows: list[dict[str, Any]], lengths: list[int]) -> str:
    """Markdown: a line for each model and way, mean over seeds and their range."""

    def cell(losses: list[float] | None) -> str:
        if losses is None:
            return "–"  # noqa: RUF001 an empty cell
        if not losses:
            return "refused"
        spread = f" ({min(losses):.3f} to {max(losses):.3f})" if len(losses) > 1 else ""
        return f"{np.mean(losses):.3f}{spread}"

    lines = [f"| model | {' | '.join(map(str, lengths))} |", "|---" * (len(lengths) + 1) + "|"]
    for (model, way), found in means(rows).items():
        cells = [cell(found.get(length)) for length in lengths]
        lines.append(f"| {model}, {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], settings: LengthsSettings) -> None:
    """Write the picture."""
    (axis,) = make_axes(1, 1, 9.5, 4.6)
    draw_on(axis, rows, settings.trained, [row["model"] for row in rows])
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    save_figure([axis], Path(settings.output))


def draw_on(axis: Any, rows: list[dict[str, Any]], trained: int, models: Iterable[str]) -> None:
    """Loss against length: colour for the model, line style for the way, band for the seeds.

    Args:
        axis: To draw on.
        rows: What `main` measured.
        trained: Longest sequence of pretraining.
        models: Names in the order of their colours; others come after them.
    """
    found = means(rows)
    lengths = sorted({row["length"] for row in rows})
    names = dict.fromkeys([*models, *(model for model, _ in found)])
    colours = dict(zip(names, COLOURS * len(names)))
    styles = dict(zip(dict.fromkeys(way for _, way in found), ("-", "--", ":")))
    plain = len(styles) == 1
    for (model, way), losses in found.items():
        places = [length for length, values in losses.items() if values]
        values = [losses[length] for length in places]
        look: dict[str, Any] = {"linestyle": styles[way], "marker": "o", "markersize": 4}
        look |= {"color": colours[model], "label": model if plain else f"{model}, {way}"}
        axis.plot(places, [np.mean(x) for x in values], **look)
        if all(len(x) > 1 for x in values):
            low, high = [min(x) for x in values], [max(x) for x in values]
            axis.fill_between(places, low, high, color=colours[model], alpha=0.15)
        refused = [length for length, values in losses.items() if not values]
        if refused:
            height = float(np.mean(values[-1])) if values else 0.0
            axis.plot(refused, [height] * len(refused), "x", color=colours[model], markersize=8,
                      label=f"{model}: {REFUSED}")  # fmt: skip
    axis.axvline(trained, color="black", linewidth=0.8, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.set_xlabel(f"length in tokens; trained up to {trained}")
    axis.set_ylabel("held-out loss (nats a predicted token)")


if __name__ == "__main__":
    run_command(main, LengthsSettings)
