"""Figures of a group: a panel for each task with a scale of its own, a dot for every seed.

The mean over seeds and its 95 % t interval are drawn for four seeds or more.
"""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from finetune.report.differences import AVERAGE, Difference
from finetune.report.runs import CONTROLS, TaskGroup, seed_scores
from train.intervals import MIN_RUNS, t_interval
from train.plotting import COLORS, make_axes, save_figure

LINES = {"majority": "--", "features": ":"}
UNIT = "headline metric × 100"  # noqa: RUF001
SEEDS = (
    f"A dot for each seed; of {MIN_RUNS} seeds or more the mean and its 95 % t interval. Every "
    "task has a scale of its own"
)

Rows = Mapping[str, tuple[str, Mapping[str, Sequence[float]]]]
"""Name -> colour, and label of a task -> values over seeds."""


@dataclass(frozen=True)
class Picture:
    """A figure on disk: name of the PNG file, and its caption."""

    file: str
    caption: str


def draw_figures(group: TaskGroup, pairs: Sequence[Difference], folder: Path) -> list[Picture]:
    """Write report-GROUP-{differences,scores}.png, as far as there is something to draw."""
    lines: dict[str, dict[str, float]] = {label: {} for label in group.titles}
    for run in group.runs[group.runs["kind"].isin(LINES)].itertuples():
        lines[run.label][LINES[run.kind]] = run.score
    zeros = {label: {"-": 0.0} for label in (*group.titles, AVERAGE)}
    caption = f"{SEEDS}. Dashed: {CONTROLS['majority']}; dotted: {CONTROLS['features']}."
    differences = f"Differences. {SEEDS}; the line at 0 is no difference."
    pictures = []
    for name, rows, marks, text in (
        ("differences", _difference_rows(pairs), zeros, differences),
        ("scores", _score_rows(group.fine_tuned()), lines, caption),
    ):
        if any(values for _, cells in rows.values() for values in cells.values()):
            file = f"report-{group.name}-{name}.png"
            titles = {**group.titles, AVERAGE: "average"}
            save_figure(draw_panels(titles, rows, marks), folder / file)
            pictures.append(Picture(file, text))
    return pictures


def draw_panels(
    titles: Mapping[str, str], rows: Rows, lines: Mapping[str, Mapping[str, float]]
) -> Figure:
    """Draw a panel for each task that has values, at most three in a row.

    Args:
        titles: Label of a task -> title of its panel.
        rows: What is drawn, from the top.
        lines: Label -> line style -> position of a vertical line.
    """
    labels = [label for label in titles if any(cells.get(label) for _, cells in rows.values())]
    names = [textwrap.fill(name, 36) for name in rows]
    height = 0.8 + 0.15 * sum(name.count("\n") + 1.6 for name in names)
    columns = min(3, len(labels))
    lengthwise = -(-len(labels) // columns)
    size = (2.9 * columns + 2.2, lengthwise * height + 0.3)
    figure, axes = make_axes(lengthwise, columns, *size, sharey=True)
    for axis in axes[len(labels) :]:
        axis.remove()
    for axis, label in zip(axes, labels):
        for position, (color, cells) in enumerate(rows.values()):
            _draw_seeds(axis, position, cells.get(label, []), color)
        for style, value in lines[label].items():
            axis.axvline(value, color="black", ls=style, lw=1)
        axis.set(title=titles[label], xlabel=UNIT, ylim=(len(names) - 0.5, -0.5))
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.grid(visible=False, axis="y")
    return figure


def _draw_seeds(axis: Axes, position: float, values: Sequence[float], color: str) -> None:
    """Dots, and for enough of them the mean with its interval."""
    axis.scatter(values, [position] * len(values), s=16, color=color, alpha=0.6, linewidths=0)
    if len(values) >= MIN_RUNS:
        mean, (low, high) = float(np.mean(values)), t_interval(values)
        style: dict[str, Any] = {"fmt": "d", "markersize": 6, "capsize": 3, "color": color}
        axis.errorbar(mean, position, xerr=[[mean - low], [high - mean]], **style)


def _score_rows(runs: pd.DataFrame) -> Rows:
    """A row for each configuration; a colour for each model and its random weights."""
    colors = dict(zip(sorted(set(runs["base_name"])), itertools.cycle(COLORS)))
    return {
        name: (
            colors[found["base_name"].iloc[0]],
            {label: list(seed_scores(cell).values()) for label, cell in found.groupby("label")},
        )
        for name, found in runs.groupby("configuration", sort=False)
    }


def _difference_rows(pairs: Sequence[Difference]) -> Rows:
    return {
        pair.title(with_part=True): (
            COLORS[2 if pair.over else 0],
            {label: list(c.differences.values()) for label, c in pair.tasks.items()},
        )
        for pair in pairs
    }
