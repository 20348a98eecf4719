"""Figures of a group: a dot for every seed, the mean over seeds and its 95 % t interval."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from finetune.report.differences import Difference
from finetune.report.runs import BASELINE, TaskGroup, format_number, seed_scores
from finetune.report.runs import shown_configurations as shown
from finetune.report.statistics import t_interval

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""
MARKERS = "os^Dv"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "text.parse_math": False,
}
UNIT = "headline metric × 100"  # noqa: RUF001
SEEDS = "A dot for each seed, the mean, and its 95 % t interval over seeds"


@dataclass(frozen=True)
class Picture:
    """A figure on disk: name of the PNG file, and its caption."""

    file: str
    caption: str


def draw_figures(
    group: TaskGroup, pairs: Sequence[Difference], controls: Sequence[Difference], folder: Path
) -> list[Picture]:
    """Write report-GROUP-{scores,differences,rates}.png, as far as there is something to draw."""
    pictures = []
    with mpl.rc_context(STYLE):
        figures = {
            "scores": (
                draw_scores(group),
                f"{SEEDS}; the dashed line is the majority baseline.",
            ),
            "differences": (
                draw_differences(group, pairs, controls),
                f"Differences. {SEEDS}; the line at 0 is no difference.",
            ),
            "rates": (draw_rates(group), f"Sensitivity to the learning rate. {SEEDS}."),
        }
        for name, (figure, caption) in figures.items():
            if figure is not None:
                file = f"report-{group.name}-{name}.png"
                figure.savefig(folder / file, dpi=150, facecolor="white")
                pictures.append(Picture(file, caption))
    return pictures


def draw_scores(group: TaskGroup) -> Figure | None:
    """A panel for each task, a row for each configuration; of several rates the best."""
    if group.runs["score"].isna().all():
        return None
    cells = {(row, label): runs for row, label, runs in group.cells()}
    configurations, styles = shown(group), _styles(group.runs)
    names = [textwrap.fill(name, 36) for name in configurations]
    lines = sum(name.count("\n") + 1.6 for name in names)
    figure, axes = _panels(len(group.titles), 0.8 + 0.15 * lines, sharey=True)
    for axis, (label, title) in zip(axes, group.titles.items()):
        for position, configuration in enumerate(configurations):
            runs = cells.get((configuration, label))
            scores = {} if runs is None else seed_scores(runs)
            if runs is not None and scores:
                style = styles[runs["model"].iloc[0], runs["tokenizer"].iloc[0]]
                hollow: dict[str, Any] = (
                    {"markerfacecolor": "none"} if runs["kind"].iloc[0] == "random" else {}
                )
                _mark(axis, position, list(scores.values()), **style, **hollow)
        if (BASELINE, label) in cells:
            baseline = cells[BASELINE, label]["score"].iloc[0]
            axis.axvline(baseline, color="black", ls="--", lw=1)
        _finish(axis, title, UNIT, names)
    return figure


def draw_differences(
    group: TaskGroup, pairs: Sequence[Difference], controls: Sequence[Difference]
) -> Figure | None:
    """A panel for each difference, a row for each task and one for their average."""
    differences = [difference for difference in (*pairs, *controls) if difference.tasks]
    if not differences:
        return None
    most = max(len(difference.tasks) for difference in differences)
    figure, axes = _panels(len(differences), 1.5 + 0.24 * most, width=3.7, margin=0.3)
    for axis, difference in zip(axes, differences):
        color = COLORS[0] if difference in pairs else COLORS[2]
        names = []
        for position, (label, comparison) in enumerate(difference.comparisons()):
            marker = "D" if label == "average" else "o"
            _mark(axis, position, list(comparison.differences.values()), color=color, fmt=marker)
            names.append(textwrap.fill(group.titles.get(label, label), 18))
        axis.axvline(0, color="black", lw=1)
        _finish(axis, textwrap.fill(difference.title, 32), f"difference, {UNIT}", names)
    return figure


def draw_rates(group: TaskGroup) -> Figure | None:
    """A panel for each task that was run with several rates, a line for each pretrained model."""
    runs = group.runs[group.runs["kind"] == "model"]
    selected = runs[runs["best_of"] != ""].drop_duplicates(["family", "label"])
    labels = [label for label in group.titles if label in set(selected["label"])]
    if not labels:
        return None
    figure, axes = _panels(len(labels), 3.0, width=3.7, margin=0.3)
    styles, single = _styles(group.runs), runs[runs["best_of"] == ""].dropna(subset="score")
    for axis, label in zip(axes, labels):
        families = selected.loc[selected["label"] == label, "family"].tolist()
        tried = single[(single["label"] == label) & single["family"].isin(families)]
        for turn, family in enumerate(families):
            # models side by side at each rate, so that they do not hide each other's dots
            shift = 1 + (turn - (len(families) - 1) / 2) * min(0.02, 0.1 / len(families))
            _draw_rate_line(axis, tried[tried["family"] == family], shift, styles)
        rates = sorted(tried["learning_rate"].unique().tolist())
        axis.set_xscale("log")
        axis.margins(x=0.08)
        axis.set_xticks(rates, [format_number(rate) for rate in rates], minor=False)
        axis.set_xticks([], minor=True)
        axis.set(xlabel="peak learning rate", ylabel=UNIT, title=group.titles[label])
        axis.grid()
    handles = {name: line for axis in axes for line, name in zip(*axis.get_legend_handles_labels())}
    names = [textwrap.fill(name, 70) for name in handles]
    figure.legend(handles.values(), names, loc="outside lower center", frameon=False)
    return figure


def _draw_rate_line(
    axis: Axes, runs: pd.DataFrame, shift: float, styles: dict[tuple[str, str], dict[str, Any]]
) -> None:
    """Learning rate times `shift` against score, for one model on one task."""
    if runs.empty:
        return
    first = runs.iloc[0]
    style = styles[first["model"], first["tokenizer"]]
    means = runs.groupby("learning_rate")["score"].mean()
    line = {"color": style["color"], "marker": style["fmt"], "ls": "--" if first["mnli"] else "-"}
    axis.plot(means.index * shift, means, label=first["family"], **line)
    for rate, of_rate in runs.groupby("learning_rate"):
        _mark(axis, rate * shift, of_rate["score"].tolist(), vertical=True, **style)


def _mark(
    axis: Axes, position: float, values: Sequence[float], vertical: bool = False, **style: Any
) -> None:
    """Dots for at least one value at one position, and their mean with its interval."""
    mean = float(np.mean(values))
    low, high = t_interval(values) if len(values) > 1 else (mean, mean)
    reach = [[mean - low], [high - mean]] if low < high else None
    positions = [position] * len(values)
    x, y = (positions, values) if vertical else (values, positions)
    axis.scatter(x, y, s=12, color=style["color"], alpha=0.45, linewidths=0)
    style = {"fmt": "o", "markersize": 6, "capsize": 3, "elinewidth": 1.6, **style}
    if vertical:
        axis.errorbar(position, mean, yerr=reach, **style)
    else:
        axis.errorbar(mean, position, xerr=reach, **style)


def _styles(runs: pd.DataFrame) -> dict[tuple[str, str], dict[str, Any]]:
    """Colour and marker of each model and tokenizer."""
    models = sorted(set(zip(runs["model"], runs["tokenizer"])))
    return {
        model: {"color": COLORS[i % len(COLORS)], "fmt": MARKERS[i // len(COLORS) % len(MARKERS)]}
        for i, model in enumerate(models)
    }


def _panels(
    count: int, height: float, width: float = 2.9, margin: float = 2.2, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels, at most three in a row; sizes in inches."""
    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns + margin, rows * height + 0.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).flatten().tolist()
    for empty in axes[count:]:
        empty.remove()
    return figure, axes[:count]


def _finish(axis: Axes, title: str, unit: str, names: Sequence[str]) -> None:
    """Title, unit and row names of a panel whose rows are numbered from the top."""
    axis.set(title=title, xlabel=unit, ylim=(len(names) - 0.5, -0.5))
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.grid(axis="x")
