"""The lines of the benchmark: a table for each part, and a picture."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.analysis.plotting import axes_of, save


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        part: The table.
        case: What was computed.
        peer: By whom.
        value: What was measured.
        unit: Of the value.
        low: Least of the ratios of neighbours; first quartile where there are many rounds.
        high: Greatest; third quartile.
        asked: What it must reach, in words; empty where nothing is asked.
        reached: Whether it does.
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


def line_of(row: Row) -> str:
    """A line of the table in Markdown."""
    digits = ".2g" if row.part == "check" else ",.0f" if abs(row.value) >= 1000 else ",.2f"
    value = f"{row.value:{digits}} {row.unit}"
    if row.low is not None:
        value += f" ({row.low:{digits}} to {row.high:{digits}})"
    verdict = {None: "", True: ", reached", False: ", **missed**"}[row.reached]
    return f"| {row.case} | {row.peer} | {value} | {row.asked}{verdict} |"


def page(about: Mapping[str, Any], rows: Sequence[Row], meanings: Mapping[str, str]) -> str:
    """All lines, a table for each part with what it means, under where and how they were made."""
    settings = about["settings"]
    named = ("machine", "threads", "torch", "transformers", "commit")
    lines = [
        "# Speed\n",
        f"`python -m train.bench --device {settings['device']}`: "
        f"{', '.join(f'{key} {about[key]}' for key in named)}; "
        f"{settings['rounds']} rounds, medians. "
        "Ratios are of neighbours in one process; another machine, another number of threads or "
        "another memory allocator has others.\n",
    ]
    for part in dict.fromkeys(row.part for row in rows):
        lines += [
            f"## {part}\n",
            f"{meanings[part]}\n",
            "| case | whose | measured (range) | must reach |",
            "|---|---|---|---|",
            *(line_of(row) for row in rows if row.part == part),
            "",
        ]
    return "\n".join(lines)


def draw(rows: Sequence[Row], theirs: str, file: Path) -> None:
    """Speed-ups over a peer with their targets, and cost against length."""
    ratios = [r for r in rows if r.unit == "x" and r.peer == theirs][::-1]
    curves = [r for r in rows if r.part == "length" and r.unit.startswith("x")]
    if not ratios or not curves:
        return
    try:
        left, right = axes_of(1, 2, 13, 5.2)
    except ImportError:  # a machine that only measures may lack matplotlib
        print("warning: no picture, matplotlib is not installed", file=sys.stderr)
        return
    for place, row in enumerate(ratios):
        assert row.low is not None
        assert row.high is not None
        error = [[row.value - row.low], [row.high - row.value]]
        left.barh(place, row.value, xerr=error, color="C0", alpha=0.8, height=0.6)
        if row.asked:
            left.plot([float(row.asked.split()[1])] * 2, [place - 0.4, place + 0.4], color="black")
    left.set_yticks(range(len(ratios)), [f"{r.part}: {r.case}" for r in ratios], fontsize=8)
    left.axvline(1, color="grey", linewidth=0.8)
    left.set_xlabel(f"times as fast as {theirs} (range of rounds; black: asked)")
    for peer, style in zip(dict.fromkeys(r.peer for r in curves), ("o-", "s--")):
        own = [r for r in curves if r.peer == peer]
        lengths = [int(r.case.split(" x ")[1].split(",")[0]) for r in own]
        right.plot(lengths, [r.value for r in own], style, label=peer)
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    right.set_xlabel("tokens a sequence")
    right.set_ylabel("cost of a token, the shortest = 1")
    right.legend(frameon=False)
    save([left, right], file)
