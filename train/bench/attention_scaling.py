"""What a layer of attention costs against the length: `python -m train.bench.attention_scaling`.

Softmax (torch's fused kernel, O(L^2) time) beside linear attention (O(L)), forward passes of one
text. Freed memory is kept, which training does not do. Every length of every kind is a process of
its own, so that its peak of memory is its own. The slope of log cost over log length, fitted from
`LEAST` tokens on, is 1 for linear and 2 for squared.
"""

import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roformer import RoFormerConfig, RoFormerModel
from roformer.configuration_rules import FEATURE_MAPS
from train.analysis.plotting import COLOURS, axes_of, require_picture, save
from train.bench.baselines import keep_freed_memory
from train.loop.launch import run_command, start_accelerator
from train.loop.run_metadata import collect_environment, peak_memory
from train.settings import require

SOFTMAX = "softmax"
KINDS = (SOFTMAX, *FEATURE_MAPS)

LEAST = 4096
"""Tokens from which slopes are fitted: below, what does not depend on the length weighs in."""


@dataclass(frozen=True)
class GrowthSettings:
    """Measure time and memory of attention against length."""

    lengths: list[int] = field(default_factory=lambda: [2**n for n in range(9, 17)])
    """Tokens of the text."""
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    """softmax, and the features of linear attention."""
    causal: bool = False
    """Measure decoders."""
    rounds: int = 5
    """Forward passes that are timed; the median counts."""
    output: str = "results/growth.png"
    """Picture to write; the numbers go beside it, ending in .json."""

    def __post_init__(self) -> None:
        for length in self.lengths:
            require(length >= 1, "lengths", "must be at least 1", length, "try 512")
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        rule = f"must be of {', '.join(KINDS)}"
        require(not unknown, "kinds", rule, unknown, "leave it out for all")
        require(self.rounds >= 1, "rounds", "must be at least 1", self.rounds, "try 3")
        require_picture(self.output)


def cost(kind: str, length: int, causal: bool, rounds: int, threads: int) -> dict[str, Any]:
    """Seconds and peak of memory of a layer of width 256 with 4 heads, in float32.

    Args:
        kind: softmax, or features.
        length: Tokens of the one text.
        causal: Whether it is a decoder.
        rounds: Passes that are timed.
        threads: Of torch.
    """
    keep_freed_memory()  # or tensors of more than 32 MB would cost more a token than smaller ones
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = RoFormerConfig(
        vocab_size=100,
        hidden_size=256,
        num_attention_heads=4,
        intermediate_size=256,
        num_hidden_layers=1,
        is_decoder=causal,
        use_cache=False,
        linear_attention=None if kind == SOFTMAX else kind,
    )
    model = RoFormerModel._from_config(config, attn_implementation="sdpa").eval()
    short, ids = torch.randint(100, (1, 64)), torch.randint(100, (1, length))
    seconds = []
    with torch.no_grad():
        model(short)  # what torch loads once
        before = _peak(forget=True)
        for _ in range(rounds):
            started = time.perf_counter()
            model(ids)
            seconds.append(time.perf_counter() - started)
    peak = _peak() - before
    return {
        "kind": kind,
        "length": length,
        "seconds": statistics.median(seconds),
        "megabytes": peak / 1e6,
    }


def _peak(forget: bool = False) -> int:
    """Most bytes this process has held, or where Linux forgets that on request, since then."""
    status = Path("/proc/self/status")
    if not status.exists():
        return peak_memory(torch.device("cpu"))
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def slope(rows: list[dict[str, Any]], key: str) -> float | None:
    """Of log cost over log length, fitted to rows of at least `LEAST` tokens; None for fewer than
    two.
    """  # noqa: D205 one sentence
    found = [(row["length"], row[key]) for row in rows if row["length"] >= LEAST and row[key] > 0]
    if len(found) < 2:
        return None
    x, y = np.log(np.array(found)).T
    return float(np.polyfit(x, y, 1)[0])


def draw(rows: list[dict[str, Any]], settings: GrowthSettings) -> None:
    """Seconds and megabytes against length, both axes by the logarithm."""
    axes = axes_of(1, 2, 10, 4.2)
    for axis, (key, label) in zip(axes, (("seconds", "seconds"), ("megabytes", "peak, MB"))):
        for kind, colour in zip(settings.kinds, COLOURS):
            own = [row for row in rows if row["kind"] == kind and row[key] > 0]
            fitted = slope(own, key)
            name = kind if fitted is None else f"{kind}, slope {fitted:.2f}"
            x, y = ([row[name] for row in own] for name in ("length", key))
            axis.plot(x, y, color=colour, marker="o", markersize=4, label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log" if axis.lines else "linear")
        axis.set_xlabel("tokens")
        axis.set_ylabel(label)
        axis.legend(frameon=False, fontsize=8)
    save(axes, Path(settings.output))


def main(settings: GrowthSettings) -> list[dict[str, Any]]:
    """Measure, draw, write the numbers, print slopes."""
    output = Path(settings.output)
    threads, rows = torch.get_num_threads(), []
    context = multiprocessing.get_context("spawn")
    for length in settings.lengths:
        for kind in settings.kinds:
            with ProcessPoolExecutor(1, context) as alone:
                wanted = kind, length, settings.causal, settings.rounds, threads
                found = alone.submit(cost, *wanted).result()
            rows.append(found)
            print(f"{kind}, {length}: {found['seconds']:.4f} s, {found['megabytes']:.0f} MB",
                  flush=True)  # fmt: skip
    slopes = {
        kind: {key: slope([r for r in rows if r["kind"] == kind], key)
               for key in ("seconds", "megabytes")}
        for kind in settings.kinds
    }  # fmt: skip
    about = collect_environment(start_accelerator()) | {"causal": settings.causal}
    draw(rows, settings)
    output.with_suffix(".json").write_text(
        json.dumps(about | {"slopes": slopes, "rows": rows}, indent=1) + "\n"
    )
    for kind, by_key in slopes.items():
        words = [f"{x:.2f} in {key}" for key, x in by_key.items() if x is not None]
        if words:
            print(f"slope of {kind}: {', '.join(words)}")
    print(f"picture: {output}")
    return rows


if __name__ == "__main__":
    run_command(main, GrowthSettings)
