"""How the influence of a token fades with distance: the paper's section 3.4.3, beyond its figure.

    python -m train.analysis.long_term_decay --models '[runs/a/model]' --corpus.validation TEXT

The paper bounds a score by its equation 37, |q^T R_{n-m} k| <= max_i |h_{i+1} - h_i| sum_j |S_j|
with h_i = q_i k_i* for pair i and S_j = sum_{i<j} exp(1j (m-n) theta_i), and draws the mean of
|S_j| over j. A bound is not the score: so queries and keys are drawn at random, equal to each other
or not, and taken from trained models and their random beginnings, before they are rotated. Each
pair is then held at every distance: what changes is the rotation alone.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

import roformer
from roformer import RoFormerConfig
from roformer.rotary import compute_inv_freq
from train.analysis.loss_curves import by_model
from train.analysis.plotting import COLOURS, check_figure_path, make_axes, save_figure
from train.data import vocabulary
from train.data.batching import SequenceIndex, make_batch
from train.data.corpus import tokenize_corpus
from train.data.masking import Vocab
from train.loop.atomic_dir import model_name
from train.loop.launch import run_command, start_accelerator
from train.loop.model_init import build_config, build_model, load_config
from train.settings import HeldOutSettings, ModelSettings, require

Floats = NDArray[np.float64]

PAIRS = 4096
"""Queries and keys that are drawn; of a model, places taken in all layers, each with every head."""

SEQUENCES = 32
"""Held-out sequences from which a model's are taken."""


@dataclass(frozen=True)
class CutTextSettings(HeldOutSettings):
    """Held-out text in sequences."""

    length: int = 128
    """Longest sequence in tokens, [CLS] and [SEP] included."""

    def __post_init__(self) -> None:
        require(self.length >= 8, "corpus.length", "must be at least 8", self.length, "try 128")


@dataclass(frozen=True)
class DecaySettings:
    """Measure how scores fade with distance."""

    models: list[str] = field(default_factory=list)
    """Folders of trained RoFormers, as [runs/a/model]; each is shown beside random weights."""
    corpus: CutTextSettings = field(default_factory=CutTextSettings)
    distances: int = 256
    """Largest distance, in tokens."""
    widths: list[int] = field(default_factory=lambda: [32, 64, 128, 256])
    """Head widths of the bound."""
    thetas: list[float] = field(default_factory=lambda: [100.0, 1000.0, 10000.0, 500000.0])
    """Bases of the angles."""
    output: str = "results/decay.png"
    """Picture to write; the numbers go beside it, ending in .json."""

    def __post_init__(self) -> None:
        require(self.distances >= 2, "distances", "must be at least 2", self.distances, "try 256")
        for width in self.widths:
            fits = width >= 2 and width % 2 == 0
            require(fits, "widths", "must be even and at least 2", width, "heads turn in pairs")
        for theta in self.thetas:
            require(theta > 1, "thetas", "must be above 1", theta, "the paper has 10000")
        check_figure_path(self.output)


def bound(distances: Floats, width: int, theta: float) -> Floats:
    """The mean over j = 1 .. d/2 of |S_j| at each distance, [n] (the paper's Fig. 2).

    Args:
        distances: m - n, [n].
        width: Head width d.
        theta: Base of the angles.
    """
    turns = np.exp(1j * distances[:, None] * compute_inv_freq(width, theta).numpy())
    return np.abs(np.cumsum(turns, axis=1)).mean(axis=1)


def scores(query: Tensor, key: Tensor, distances: Floats, theta: Tensor) -> dict[str, list[float]]:
    """Mean score and mean absolute score over pairs at each distance, as cosines.

    Args:
        query: [N, D], not rotated.
        key: [N, D].
        distances: [n].
        theta: [D/2].

    Returns:
        `mean` and `size`, [n] each, in [-1, 1]: scores divided by the norms of both.
    """
    sides = []
    for x in (query, key):
        x = x.double() / x.double().norm(dim=-1, keepdim=True)
        sides.append(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()))
    products = sides[0] * sides[1].conj()  # [N, D/2], h_i; their score is Re sum_i h_i e^(1j ..)
    turns = torch.exp(1j * torch.from_numpy(distances)[:, None] * theta.double())  # [n, D/2]
    found = (products @ turns.T).real  # [N, n]
    return {"mean": found.mean(0).tolist(), "size": found.abs().mean(0).tolist()}


def of_random_vectors(
    width: int, theta: float, distances: Floats
) -> dict[str, dict[str, list[float]]]:
    """Of queries and keys that are normally distributed, apart and equal."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(PAIRS, width, generator=generator) for _ in range(2))
    angles = compute_inv_freq(width, theta)
    pairs = {"random, apart": key, "random, equal": query}
    return {name: scores(query, other, distances, angles) for name, other in pairs.items()}


def of_model(
    folder: str, corpus: CutTextSettings, distances: Floats, accelerator: Accelerator
) -> dict[str, dict[str, list[float]]]:
    """Of the queries and keys that a trained model and its random beginning make of real text.

    Raises:
        InputError: It is no RoFormer that rotates, or cannot be loaded.
    """
    tokenizer = vocabulary.load_tokenizer(folder, key="models")
    saved = load_config(folder, key="models")
    fits = (
        isinstance(saved, RoFormerConfig)
        and (saved.position_encoding, saved.linear_attention) == ("rope", None)
        and saved.rope_interleave
        and (saved.rope_parameters or {}).get("rope_type") == "default"
    )
    rule = "must be RoFormers with softmax whose adjacent pairs turn by plain angles"
    require(fits, "models", rule, folder, "leave it out")
    trained = ModelSettings(init=folder, attention="eager")
    config = build_config(trained, corpus.length, tokenizer)
    beginning = ModelSettings(attention="eager")
    with accelerator.local_main_process_first():
        store = tokenize_corpus(corpus, "validation", tokenizer)
    sequences = SequenceIndex(store, corpus.length)
    rows = np.arange(min(SEQUENCES, len(sequences)))
    batch = make_batch(sequences, rows, rows * 0, Vocab.from_tokenizer(tokenizer), 0.15, 0)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    theta = compute_inv_freq(config.rotary_dim, config.rope_parameters["rope_theta"])
    found = {}
    for name, settings in (("trained", trained), ("untrained", beginning)):
        model = build_model(settings, config, seed=0).eval()
        query, key = queries_and_keys(model.base_model, inputs, config.rotary_dim)
        found[f"{model_name(folder)}, {name}"] = scores(query, key, distances, theta)
    return found


@torch.no_grad()
def queries_and_keys(model: Any, inputs: dict[str, Tensor], width: int) -> tuple[Tensor, Tensor]:
    """Of random pairs of tokens of one sequence, all heads and layers together, [N, D'] each."""
    seen: dict[str, list[Tensor]] = {"query": [], "key": []}
    hooks = []
    for layer in model.encoder.layer:
        attention = layer.attention.self
        heads = attention.heads
        for name, kept in seen.items():
            hooks.append(
                getattr(attention, name).register_forward_hook(
                    lambda module, given, made, kept=kept, heads=heads: kept.append(
                        made.unflatten(-1, heads)[..., :width]
                    )
                )
            )
    model(**inputs)
    for hook in hooks:
        hook.remove()
    generator = torch.Generator().manual_seed(0)
    rows, places = inputs["attention_mask"].bool().nonzero(as_tuple=True)
    lengths = inputs["attention_mask"].sum(-1)
    chosen = torch.randint(len(rows), (PAIRS // len(seen["query"]),), generator=generator)
    row, place = rows[chosen], places[chosen]
    other = (torch.rand(len(chosen), generator=generator) * lengths[row]).long()
    queries = torch.cat([layer[row, place].flatten(0, 1) for layer in seen["query"]])
    keys = torch.cat([layer[row, other].flatten(0, 1) for layer in seen["key"]])
    return queries, keys


def draw(numbers: dict[str, Any], output: Path) -> None:
    """Three panels: the bound for bases, for widths, and what scores do."""
    axes = make_axes(1, 3, 14, 4.2)
    x = numbers["distances"]
    for axis, kind in zip(axes, ("thetas", "widths")):
        for row, colour in zip(numbers["bound"][kind], COLOURS):
            label = f"theta {row['theta']:g}, d {row['width']}"
            axis.plot(x, row["values"], color=colour, linewidth=1.2, label=label)
        axis.set_ylabel("mean of |S_j|, the paper's bound")
    for (name, found), colour in zip(numbers["scores"].items(), COLOURS * 2):
        axes[2].plot(x, found["mean"], color=colour, linewidth=1.2, label=name)
        axes[2].plot(x, found["size"], color=colour, linewidth=0.8, linestyle=":")
    axes[2].set_ylabel("score as a cosine: mean; dotted, mean of its size")
    for axis in axes:
        axis.set_xlabel("distance m − n in tokens")  # noqa: RUF001 the sign
        axis.legend(frameon=False, fontsize=8)
    save_figure(axes, output)


def main(settings: DecaySettings) -> dict[str, Any]:
    """Compute, draw, write the numbers, print where scores begin and end."""
    roformer.use_for_auto_classes()
    transformers.utils.logging.disable_progress_bar()
    accelerator = start_accelerator()
    distances = np.arange(settings.distances + 1, dtype=np.float64)
    width, theta = 64, 10000.0  # a base model's head, the paper's base
    combinations = {
        "thetas": [(width, base) for base in settings.thetas],
        "widths": [(d, theta) for d in settings.widths],
    }
    by_model([model_name(folder) for folder in settings.models])  # refuses two of one name
    found = of_random_vectors(width, theta, distances)
    for folder in settings.models:
        found |= of_model(folder, settings.corpus, distances, accelerator)
    numbers: dict[str, Any] = {
        "distances": distances.tolist(),
        "bound": {
            kind: [{"width": d, "theta": t, "values": bound(distances, d, t).tolist()}
                   for d, t in pairs]
            for kind, pairs in combinations.items()
        },
        "scores": found,
    }  # fmt: skip
    if accelerator.is_main_process:
        output = Path(settings.output)
        draw(numbers, output)
        output.with_suffix(".json").write_text(json.dumps(numbers) + "\n")
        print(summary(numbers))
        print(f"picture: {output}")
    return numbers


def summary(numbers: dict[str, Any]) -> str:
    """Where bounds and scores begin, and their mean over the last 16 distances."""

    def ends(values: list[float], form: str) -> str:
        return f"{values[0]:{form}} at 0, {np.mean(values[-16:]):{form}} at {far:.0f}"

    far = numbers["distances"][-1]
    bounds = [row for rows in numbers["bound"].values() for row in rows]
    lines = [
        f"bound, d {row['width']}, theta {row['theta']:g}: {ends(row['values'], '.1f')}"
        for row in bounds
    ]
    for name, row in numbers["scores"].items():
        sizes = ends(row["size"], ".3f")
        lines.append(f"score, {name}: {ends(row['mean'], '+.3f')}; its size {sizes}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main, DecaySettings)
