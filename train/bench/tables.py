"""Measurements of the benchmark, their Markdown page and their figure."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.plotting import make_axes, save_figure
from train.tables import markdown_table


@dataclass(frozen=True)
class Measurement:
    """One row of a table; the fields are keys of the JSON file.

    Attributes:
        part: Table, a part of the benchmark.
        case: What was computed.
        peer: Model that was measured, or compared with.
        value: Median.
        unit: Unit of the value.
        low: Lowest ratio of a round, or first quartile.
        high: Highest ratio, or third quartile.
        asked: Target, such as ">= 2 x"; empty without one.
        reached: Whether the target is reached.
    """

    part: str
    case: str
    peer: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    asked: str = ""
    reached: bool | None = None

    def cells(self) -> list[str]:
        """Format the row of the table."""
        digits = ",.0f" if abs(self.value) >= 1000 else ",.2f"
        value = f"{self.value:{digits}} {self.unit}"
        if self.low is not None:
            value += f" ({self.low:{digits}} to {self.high:{digits}})"
        verdict = {None: "", True: ", reached", False: ", **missed**"}[self.reached]
        return [self.case, self.peer, value, f"{self.asked}{verdict}"]


def markdown_page(environment: Mapping[str, Any], rows: Sequence[Measurement]) -> str:
    """Format a page with a table and its caption for each part.

    Args:
        environment: The keys of `collect_environment`; `settings` of the benchmark; `parts` with
            the caption, seconds and commit of each.
        rows: Measurements.
    """
    settings = environment["settings"]
    keys = ("machine", "threads", "torch", "transformers")
    lines = [
        "# Speed\n",
        f"`python -m train.bench --device {settings['device']}`: "
        f"{', '.join(f'{key} {environment[key]}' for key in keys)}; "
        f"medians of {settings['rounds']} turns. Ratios are between models that alternate in one "
        "process, a new one for each case; other machines, thread counts and memory allocators "
        "give others.\n",
    ]
    header = ["case", "model", "measured (range)", "target"]
    for part, about in environment["parts"].items():
        table = markdown_table(header, [row.cells() for row in rows if row.part == part])
        measured = f"Measured in {about['seconds']:.0f} s at commit {about['commit']}."
        lines += [f"## {part}\n", f"{about['caption']} {measured}\n", f"{table}\n"]
    return "\n".join(lines)


def plot(rows: Sequence[Measurement], baseline: str, file: Path) -> None:
    """Plot the speed-ups over a baseline with their targets; nothing if there are none."""
    ratios = [row for row in rows if row.unit == "x" and row.peer == baseline][::-1]
    if not ratios:
        return
    try:
        (axis,) = make_axes(1, 1, 8, 5.2)
    except ImportError:  # optional on a machine that only measures
        print("warning: no figure, matplotlib is not installed", file=sys.stderr)
        return
    for y, row in enumerate(ratios):
        low, high = row.low or row.value, row.high or row.value
        error = [[row.value - low], [high - row.value]]
        axis.barh(y, row.value, xerr=error, color="C0", alpha=0.8, height=0.6)
        if row.asked:
            axis.plot([float(row.asked.split()[1])] * 2, [y - 0.4, y + 0.4], color="black")
    axis.set_yticks(range(len(ratios)), [f"{row.part}: {row.case}" for row in ratios], fontsize=8)
    axis.axvline(1, color="grey", linewidth=0.8)
    axis.set_xlabel(f"speed-up over {baseline} (range of rounds; black: target)")
    save_figure([axis], file)
