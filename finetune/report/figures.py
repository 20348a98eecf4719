"""The figures of the report: scores and differences, seed by seed.

A figure has a panel for each task with a scale of its own, a dot for every seed, and for four seeds
or more the mean with its 95 % t interval.
"""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

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

FigureRows = Mapping[str, tuple[str, Mapping[str, Sequence[float]]]]
"""Name -> colour, and dataset -> values over seeds."""


def draw_figures(
    group: TaskGroup, differences: Sequence[Difference], folder: Path
) -> dict[str, str]:
    """Write report-GROUP-{differences,scores}.png, as far as there is something to draw.

    Returns:
        File name -> caption.
    """
    lines: dict[str, dict[str, float]] = {dataset: {} for dataset in group.titles}
    for run in group.rows[group.rows["kind"].isin(LINES)].itertuples():
        lines[run.dataset][LINES[run.kind]] = run.score
    zeros = {dataset: {"-": 0.0} for dataset in (*group.titles, AVERAGE)}
    caption = f"{SEEDS}. Dashed: {CONTROLS['majority']}; dotted: {CONTROLS['features']}."
    text_of_differences = f"Differences. {SEEDS}; the line at 0 is no difference."
    pictures = {}
    for name, rows, marks, text in (
        ("differences", _difference_rows(differences), zeros, text_of_differences),
        ("scores", _score_rows(group.fine_tuned()), lines, caption),
    ):
        if any(values for _, cells in rows.values() for values in cells.values()):
            file = f"report-{group.name}-{name}.png"
            titles = {**group.titles, AVERAGE: "average"}
            save_figure(draw_panels(titles, rows, marks), folder / file)
            pictures[file] = text
    return pictures


def draw_panels(
    titles: Mapping[str, str], rows: FigureRows, lines: Mapping[str, Mapping[str, float]]
) -> Figure:
    """Draw a panel for each task that has values, at most three in a row.

    Args:
        titles: Dataset -> title of its panel.
        rows: What is drawn, from the top.
        lines: Dataset -> line style -> position of a vertical line.
    """
    datasets = [
        dataset for dataset in titles if any(cells.get(dataset) for _, cells in rows.values())
    ]
    names = [textwrap.fill(name, 36) for name in rows]
    height = 0.8 + 0.15 * sum(name.count("\n") + 1.6 for name in names)
    panel_columns = min(3, len(datasets))
    panel_rows = -(-len(datasets) // panel_columns)
    size = (2.9 * panel_columns + 2.2, panel_rows * height + 0.3)
    figure, axes = make_axes(panel_rows, panel_columns, *size, sharey=True)
    for axis in axes[len(datasets) :]:
        axis.remove()
    for axis, dataset in zip(axes, datasets):
        for position, (color, cells) in enumerate(rows.values()):
            _draw_seeds(axis, position, cells.get(dataset, []), color)
        for style, value in lines[dataset].items():
            axis.axvline(value, color="black", ls=style, lw=1)
        axis.set(title=titles[dataset], xlabel=UNIT, ylim=(len(names) - 0.5, -0.5))
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.grid(visible=False, axis="y")
    return figure


def _draw_seeds(axis: Axes, position: float, values: Sequence[float], color: str) -> None:
    """Dots, and for enough of them the mean with its interval."""
    axis.scatter(values, [position] * len(values), s=16, color=color, alpha=0.6, linewidths=0)
    if len(values) >= MIN_RUNS:
        mean, (low, high) = float(np.mean(values)), t_interval(values)
        bars = [[mean - low], [high - mean]]
        axis.errorbar(mean, position, xerr=bars, fmt="d", markersize=6, capsize=3, color=color)


def _score_rows(runs: pd.DataFrame) -> FigureRows:
    """A row for each configuration; a colour for each model and its random weights."""
    colors = dict(zip(sorted(set(runs["base_name"])), itertools.cycle(COLORS)))
    return {
        name: (
            colors[found["base_name"].iloc[0]],
            {
                dataset: list(seed_scores(cell).values())
                for dataset, cell in found.groupby("dataset")
            },
        )
        for name, found in runs.groupby("configuration", sort=False)
    }


def _difference_rows(differences: Sequence[Difference]) -> FigureRows:
    return {
        pair.title(with_seeds=True): (
            COLORS[2 if pair.is_over_pretraining_seeds else 0],
            {dataset: list(c.differences.values()) for dataset, c in pair.tasks.items()},
        )
        for pair in differences
    }
