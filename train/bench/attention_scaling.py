"""Time and memory of attention against length: `python -m train.bench.attention_scaling`.

Compares softmax attention (torch's fused kernel, O(L^2) time) with linear attention (O(L)) in
forward passes of one sequence. Every measurement has a process of its own, which keeps freed
memory, so that peaks are independent. The slope of log(time) over log(length), fitted from
`MIN_FIT_LENGTH` tokens on, is 1 for linear and 2 for quadratic cost.
"""

import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roformer import RoFormerConfig, RoFormerModel
from roformer.configuration_rules import FEATURE_MAPS
from train.bench.baselines import keep_freed_memory
from train.bench.processes import in_new_process
from train.command_line import run_command
from train.environment import collect_environment, peak_memory
from train.loop.launch import start_accelerator
from train.plotting import COLOURS, check_figure_path, make_axes, save_figure
from train.settings import require

SOFTMAX = "softmax"
KINDS = (SOFTMAX, *FEATURE_MAPS)
COSTS = ("seconds", "megabytes")

MIN_FIT_LENGTH = 4096
"""Shorter lengths are not used for slopes: costs that do not depend on length dominate there."""


@dataclass(frozen=True)
class ScalingSettings:
    """Measure time and memory of attention against length."""

    lengths: list[int] = field(default_factory=lambda: [2**n for n in range(9, 17)])
    """Sequence lengths in tokens."""
    causal: bool = False
    """Measure decoders."""
    rounds: int = 5
    """Forward passes; their median is reported."""
    output: str = "results/growth.png"
    """Figure to write; the numbers are written beside it as .json."""

    def __post_init__(self) -> None:
        for length in self.lengths:
            require(length >= 1, "lengths", "must be at least 1", length, "use 512")
        require(self.rounds >= 1, "rounds", "must be at least 1", self.rounds, "use 5")
        check_figure_path(self.output)


def measure(kind: str, length: int, causal: bool, rounds: int) -> dict[str, Any]:
    """Measure a float32 layer of width 256 with 4 heads; call it in a new process.

    Args:
        kind: softmax, or a feature map.
        length: Tokens of the sequence.
        causal: Whether the model is a decoder.
        rounds: Number of forward passes.

    Returns:
        kind, length, median seconds, and peak megabytes beyond the model.
    """
    keep_freed_memory()
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
    warm_up, ids = torch.randint(100, (1, 64)), torch.randint(100, (1, length))
    seconds = []
    with torch.no_grad():
        model(warm_up)
        before = peak_bytes(reset=True)
        for _ in range(rounds):
            started = time.perf_counter()
            model(ids)
            seconds.append(time.perf_counter() - started)
    megabytes = (peak_bytes() - before) / 1e6
    median = statistics.median(seconds)
    return {"kind": kind, "length": length, "seconds": median, "megabytes": megabytes}


def peak_bytes(reset: bool = False) -> int:
    """Peak resident memory of this process, on Linux since the last reset."""
    status = Path("/proc/self/status")
    if not status.exists():
        return peak_memory(torch.device("cpu"))
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def fit_slope(rows: list[dict[str, Any]], cost: str) -> float | None:
    """Slope of log(cost) over log(length) from `MIN_FIT_LENGTH` on; None for fewer than 2 rows."""
    rows = [row for row in rows if row["length"] >= MIN_FIT_LENGTH and row[cost] > 0]
    if len(rows) < 2:
        return None
    x, y = np.log([[row["length"], row[cost]] for row in rows]).T
    return float(np.polyfit(x, y, 1)[0])


def plot(rows: list[dict[str, Any]], slopes: dict[str, Any], output: Path) -> None:
    """Plot both costs against length on logarithmic axes."""
    axes = make_axes(1, 2, 10, 4.2)
    for axis, cost in zip(axes, COSTS):
        for kind, colour in zip(slopes, COLOURS):
            own = [row for row in rows if row["kind"] == kind and row[cost] > 0]
            slope = slopes[kind][cost]
            label = kind if slope is None else f"{kind}, slope {slope:.2f}"
            x, y = [row["length"] for row in own], [row[cost] for row in own]
            axis.plot(x, y, color=colour, marker="o", markersize=4, label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log" if any(row[cost] > 0 for row in rows) else "linear")
        axis.set_xlabel("tokens")
        axis.set_ylabel("seconds" if cost == "seconds" else "peak, MB")
        axis.legend(frameon=False, fontsize=8)
    save_figure(axes, output)


def main(settings: ScalingSettings) -> list[dict[str, Any]]:
    """Measure every kind at every length, write figure and numbers, print slopes."""
    output = Path(settings.output)
    rows = []
    for length in settings.lengths:
        for kind in KINDS:
            row = in_new_process(measure, kind, length, settings.causal, settings.rounds)
            rows.append(row)
            cost = f"{row['seconds']:.4f} s, {row['megabytes']:.0f} MB"
            print(f"{kind}, {length}: {cost}", flush=True)
    slopes = {}
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind]
        slopes[kind] = {cost: fit_slope(own, cost) for cost in COSTS}
        fitted = [f"{x:.2f} in {cost}" for cost, x in slopes[kind].items() if x is not None]
        if fitted:
            print(f"slope of {kind}: {', '.join(fitted)}")
    plot(rows, slopes, output)
    numbers = collect_environment(start_accelerator()) | {"causal": settings.causal}
    numbers |= {"slopes": slopes, "rows": rows}
    output.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"figure: {output}")
    return rows


if __name__ == "__main__":
    run_command(main, ScalingSettings)
