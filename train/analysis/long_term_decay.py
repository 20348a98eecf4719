"""Long-term decay of attention scores with distance (section 3.4.3 of the paper).

    python -m train.analysis.long_term_decay --models '[runs/a/model]' --corpus.validation TEXT

The paper bounds a score by its equation 37, |q^T R_{n-m} k| <= max_i |h_{i+1} - h_i| sum_j |S_j|
with h_i = q_i k_i* for pair i and S_j = sum_{i<j} exp(1j (m-n) theta_i), and plots the mean of
|S_j| over j (Fig. 2). Beyond the bound, this command measures scores: of random queries and keys,
independent or equal, and of those that trained and untrained models compute before the rotation.
Every pair is rotated to every distance, so that only the rotation changes.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from roformer import use_for_auto_classes
from roformer.rotary import compute_inv_freq
from train.command_line import run_command
from train.data import vocabulary
from train.data.batching import BatchFormat, SequenceIndex, make_batch
from train.data.corpus import tokenize_corpus
from train.data.vocabulary import Vocab
from train.loop.language_model import build_model, has_plain_rope, load_config
from train.plotting import COLORS, check_figure_path, make_axes, save_figure
from train.run_names import find_folders
from train.settings import InputError, ModelSettings, TextSettings, check_fields

Floats = NDArray[np.float64]
Scores = dict[str, list[float]]

NUM_PAIRS = 4096
"""Random pairs of a query and a key; for models, pairs of tokens in all layers and heads."""

NUM_SEQUENCES = 32
"""Held-out sequences from which the tokens of models are drawn."""

BOUNDS = ((64, 1e2), (64, 1e3), (64, 1e4), (64, 5e5), (32, 1e4), (128, 1e4), (256, 1e4))
"""Head widths and bases for which the bound is computed."""


@dataclass(frozen=True)
class DecaySettings:
    """Measure the decay of attention scores with distance."""

    models: list[str] = field(default_factory=list)
    """Folders of trained RoFormers, as [runs/a/model]; each is compared with random weights."""
    corpus: TextSettings = field(default_factory=TextSettings)
    length: int = 128
    """Longest sequence in tokens, [CLS] and [SEP] included."""
    distances: int = 256
    """Largest distance in tokens."""
    output: str = "runs/decay.png"
    """Figure to write; the numbers are written beside it as .json."""

    def __post_init__(self) -> None:
        check_fields(self, lambda x: x >= 8, "must be at least 8", "length", "distances")
        check_figure_path(self.output)


def decay_bound(distances: Floats, width: int, theta: float) -> Floats:
    """Mean of |S_j| over j = 1 .. d/2 at each distance m - n (Fig. 2), [n], for head width d."""
    rotations = np.exp(1j * distances[:, None] * compute_inv_freq(width, theta).numpy())
    return np.abs(np.cumsum(rotations, axis=1)).mean(axis=1)


def decay_of_scores(query: Tensor, key: Tensor, distances: Floats, inv_freq: Tensor) -> Scores:
    """Mean score and mean absolute score over pairs at each distance, as cosines.

    Queries and keys [N, D] are not rotated, distances m - n are [n], and inv_freq theta_i [D/2].
    Returns `mean` and `size` (absolute), [n] each, in [-1, 1]: scores divided by both norms.
    """
    pairs = (F.normalize(x.double(), dim=-1).unflatten(-1, (-1, 2)) for x in (query, key))
    q, k = map(torch.view_as_complex, pairs)
    h = q * k.conj()  # [N, D/2]
    rotations = torch.exp(1j * torch.from_numpy(distances)[:, None] * inv_freq.double())  # [n, D/2]
    scores = (h @ rotations.T).real  # [N, n]
    return {"mean": scores.mean(0).tolist(), "size": scores.abs().mean(0).tolist()}


def decay_of_random_vectors(distances: Floats) -> dict[str, Scores]:
    """Decay for normally distributed queries and keys, independent ("apart") and equal.

    They have the head width of a base model and the paper's theta.
    """
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(NUM_PAIRS, 64, generator=generator) for _ in range(2))
    inv_freq = compute_inv_freq(64, 10000.0)
    return {
        "random, apart": decay_of_scores(query, key, distances, inv_freq),
        "random, equal": decay_of_scores(query, query, distances, inv_freq),
    }


def decay_of_model(
    name: str, folder: str, settings: DecaySettings, distances: Floats
) -> dict[str, Scores]:
    """Decay for queries and keys of a model on held-out text, trained and with random weights."""
    tokenizer = vocabulary.load_tokenizer(folder, key="models")
    config = load_config(folder, key="models")
    if not (has_plain_rope(config) and config.rope_interleave):
        raise InputError(
            "models must be RoFormers with softmax attention, adjacent pairs and the default "
            f"rope_type, got {folder}; leave it out"
        )
    store = tokenize_corpus(settings.corpus, "validation", tokenizer)
    sequences = SequenceIndex(store, settings.length)
    rows = np.arange(min(NUM_SEQUENCES, len(sequences)))
    batch_format = BatchFormat(Vocab.from_tokenizer(tokenizer), mask_rate=0.15, seed=0)
    batch = make_batch(sequences, rows, np.zeros_like(rows), batch_format)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    inv_freq = compute_inv_freq(config.rotary_dim, config.rope_parameters["rope_theta"])
    decays = {}
    for state, init in (("trained", folder), ("untrained", None)):
        model = build_model(ModelSettings(init=init, attention="eager"), config, seed=0).eval()
        pairs = queries_and_keys(model.base_model, inputs, config.rotary_dim)
        decays[f"{name}, {state}"] = decay_of_scores(*pairs, distances, inv_freq)
    return decays


@torch.no_grad()
def queries_and_keys(
    model: Any, inputs: dict[str, Tensor], rotary_dim: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys of random pairs of tokens in one sequence, before the rotation.

    They are of all layers and heads of an encoder, [N, rotary_dim] each.
    """
    layers = [layer.attention.self for layer in model.encoder.layer]
    hidden_states = model(**inputs, output_hidden_states=True).hidden_states
    generator = torch.Generator().manual_seed(0)
    rows, positions = inputs["attention_mask"].bool().nonzero(as_tuple=True)
    lengths = inputs["attention_mask"].sum(-1)
    pairs = NUM_PAIRS // len(layers)
    drawn = torch.randint(len(rows), (pairs,), generator=generator)
    row, position = rows[drawn], positions[drawn]
    other = (torch.rand(pairs, generator=generator) * lengths[row]).long()
    queries = torch.cat([x.query(h[row, position]) for x, h in zip(layers, hidden_states)])
    keys = torch.cat([x.key(h[row, other]) for x, h in zip(layers, hidden_states)])
    heads = (layers[0].num_attention_heads, layers[0].attention_head_size)
    query, key = (x.unflatten(-1, heads).flatten(0, 1)[:, :rotary_dim] for x in (queries, keys))
    return query, key


def main(settings: DecaySettings) -> None:
    """Compute bounds and scores, write figure and numbers, print a summary."""
    use_for_auto_classes()
    transformers.utils.logging.disable_progress_bar()
    distances = np.arange(settings.distances + 1, dtype=np.float64)
    scores = decay_of_random_vectors(distances)
    for name, folder in find_folders(settings.models, "models").items():
        scores |= decay_of_model(name, folder, settings, distances)
    bounds = {
        f"d {width}, theta {theta:g}": decay_bound(distances, width, theta).tolist()
        for width, theta in BOUNDS
    }
    numbers = {"distances": distances.tolist(), "bound": bounds, "scores": scores}
    output = Path(settings.output)
    plot(numbers, output)
    output.with_suffix(".json").write_text(json.dumps(numbers) + "\n")
    for label, values in bounds.items():
        print(f"bound, {label}: {format_ends(values, '.1f')}")
    for name, row in scores.items():
        mean, size = format_ends(row["mean"], "+.3f"), format_ends(row["size"], ".3f")
        print(f"score, {name}: {mean}; absolute {size}")
    print(f"figure: {output}")


def plot(numbers: dict[str, Any], output: Path) -> None:
    """Plot the bounds and the scores."""
    figure, (bound, score) = make_axes(1, 2, 10, 4.2)
    x = numbers["distances"]
    for (label, values), color in zip(numbers["bound"].items(), COLORS):
        bound.plot(x, values, color=color, label=label)
    bound.set_ylabel("mean of |S_j|, the paper's bound")
    for (name, decay), color in zip(numbers["scores"].items(), COLORS * len(numbers["scores"])):
        score.plot(x, decay["mean"], color=color, label=name)
        score.plot(x, decay["size"], color=color, linewidth=0.8, linestyle=":")
    score.set_ylabel("score as a cosine: mean; dotted: mean of absolute values")
    for axis in (bound, score):
        axis.set_xlabel("distance m − n in tokens")  # noqa: RUF001 the sign
        axis.legend()
    save_figure(figure, output)


def format_ends(values: list[float], digits: str) -> str:
    """Format the value at distance 0 and the mean over the last 16 distances."""
    first = max(0, len(values) - 16)
    last = f"{np.mean(values[first:]):{digits}} from {first} to {len(values) - 1}"
    return f"{values[0]:{digits}} at 0, {last}"


if __name__ == "__main__":
    run_command(main, DecaySettings)
