"""Figures of a table: a dot for every seed, the mean over seeds and its 95 % t interval.

Drawn without a screen, byte for byte the same every time. In the SVG, text and axes take the colour
of the page around them.
"""

import io
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from finetune.report.cells import Cell, Row, number
from finetune.report.page import Picture
from finetune.report.statistics import t_interval
from finetune.report.tables import BEST, Table, sweeps, without_rates

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's, which the colour-blind tell apart; without the two that vanish on a page."""
INK = "#010203"  # stands for the page's own colour of text until the SVG is written
LOOK: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.parse_math": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor",
                     "xtick.color", "ytick.color"), INK),
}  # fmt: skip
UNIT = "headline metric × 100"  # noqa: RUF001


def draw(table: Table, folder: Path) -> list[Picture]:
    """Write report-GROUP-WHAT.png for each figure that the table has something for.

    Returns:
        The same as SVG.
    """
    pictures = []
    seeds = "A dot for each seed, the mean, and its 95 % t interval over seeds"
    for what, caption, make in (
        ("scores", f"{seeds}; the dashed line is the majority baseline.", draw_scores),
        ("differences", f"Differences. {seeds}; the line at 0 is no difference.", draw_differences),
        ("rates", f"Sensitivity to the learning rate. {seeds}.", draw_rates),
    ):
        with mpl.rc_context(LOOK):
            figure = make(table)
            if figure is not None:
                name = f"report-{table.group}-{what}"
                figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white")
                figure.set_layout_engine("none")  # it is laid out
                stream = io.StringIO()
                figure.savefig(stream, format="svg", transparent=True)
                svg = stream.getvalue().replace(INK, "currentColor")
                pictures.append(Picture(name, caption, svg))
    return pictures


def panels(
    count: int, height: float, width: float = 2.9, margin: float = 2.2, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, at most 3 beside each other, of so many inches."""
    columns = min(3, count)
    rows = -(-count // columns)
    size = (width * columns + margin, rows * height + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).flatten().tolist()
    for empty in axes[count:]:
        empty.remove()
    return figure, axes[:count]


def looks(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Any]]:
    """A colour for each model, and another shape where the colours begin anew."""
    sides = sorted({row.key.side for row in rows if row.kind != "majority"})
    turns = [divmod(i, len(COLORS)) for i in range(len(sides))]
    return {side: {"color": COLORS[i], "fmt": "os^Dv"[n % 5]} for side, (n, i) in zip(sides, turns)}


def mark(
    axes: Axes, place: float, values: Collection[float], upright: bool = False, **look: Any
) -> None:
    """Dots for some values at one place, and on them the mean with its interval.

    Args:
        axes: Panel.
        place: Height of the row, or where on the x-axis if `upright`.
        values: At least one.
        upright: Whether values lie along y.
        look: For `errorbar`; `color` is that of the dots as well.
    """
    sample = np.array(list(values))
    mean = sample.mean()
    low, high = t_interval(sample) if len(sample) > 1 else (mean, mean)
    reach = [[max(0.0, mean - low)], [max(0.0, high - mean)]] if low < high else None
    look = {"fmt": "o", "markersize": 6, "capsize": 3, "elinewidth": 1.6, **look}
    places = np.full(len(sample), place)
    if upright:
        axes.scatter(places, sample, s=12, color=look["color"], alpha=0.45, linewidths=0)
        axes.errorbar(place, mean, yerr=reach, **look)
    else:
        axes.scatter(sample, places, s=12, color=look["color"], alpha=0.45, linewidths=0)
        axes.errorbar(mean, place, xerr=reach, **look)


def draw_scores(table: Table) -> Figure | None:
    """A panel for each task, a line for each row; rates that were tried appear as the best."""
    rows = without_rates(table.rows)
    if not any(cell.scored for row in rows for cell in row.cells.values()):
        return None
    names = [textwrap.fill(row.name, 36) for row in rows]
    lines = sum(name.count("\n") + 1.6 for name in names)
    figure, axes = panels(len(table.labels), 0.8 + 0.15 * lines, sharey=True)
    models, floors = looks(rows), table.rows[-1].cells
    for axis, (label, title) in zip(axes, table.labels.items()):
        for place, row in enumerate(rows):
            if label in row.cells and row.cells[label].scored:
                hollow: dict[str, Any] = {"markerfacecolor": "none"} if row.kind == "random" else {}
                values = row.cells[label].headlines.values()
                mark(axis, place, values, **models[row.key.side], **hollow)
        if label in floors:
            axis.axvline(next(iter(floors[label].headlines.values())), color=INK, ls="--", lw=1)
        finish(axis, title, UNIT, names)
    return figure


def draw_differences(table: Table) -> Figure | None:
    """A panel for each difference: tasks from above, their average last."""
    pairs = [x for x in (*table.pairs, *table.controls) if x.tasks]
    if not pairs:
        return None
    most = max(len(difference.tasks) for difference in pairs)
    figure, axes = panels(len(pairs), 1.5 + 0.24 * most, width=3.7, margin=0.3)
    for axis, difference in zip(axes, pairs):
        shown = [(table.labels[label], c, "o") for label, c in difference.tasks.items()]
        shown += [("average", difference.average, "D")] if difference.average else []
        for place, (_, comparison, shape) in enumerate(shown):
            color = COLORS[0] if difference in table.pairs else COLORS[2]
            mark(axis, place, comparison.differences.values(), color=color, fmt=shape)
        axis.axvline(0, color=INK, lw=1)
        names = [textwrap.fill(name, 18) for name, *_ in shown]
        finish(axis, textwrap.fill(difference.title, 32), f"difference, {UNIT}", names)
    return figure


def draw_rates(table: Table) -> Figure | None:
    """A panel for each task that was run with several rates, a line for each pretrained model."""
    found = [(best, rates) for best, rates in sweeps(table.rows) if best.kind == "model"]
    labels = [label for label in table.labels if any(label in best.cells for best, _ in found)]
    if not labels:
        return None
    figure, axes = panels(len(labels), 3.0, width=3.7, margin=0.3)
    models = looks(table.rows)
    for axis, label in zip(axes, labels):
        lines = [(best, [row.cells[label] for row in rates if label in row.cells])
                 for best, rates in found if label in best.cells]  # fmt: skip
        rates = sorted({cell.rate for _, cells in lines for cell in cells})
        for turn, (best, cells) in enumerate(lines):
            # beside each other: models at one rate would hide each other's dots
            shift = 1 + (turn - (len(lines) - 1) / 2) * min(0.02, 0.1 / len(lines))
            draw_rate_line(axis, best, cells, shift, models[best.key.side])
        axis.set_xscale("log")
        axis.margins(x=0.08)
        axis.set_xticks(rates, [number(rate) for rate in rates], minor=False)
        axis.set_xticks([], minor=True)
        axis.set(xlabel="peak learning rate", ylabel=UNIT, title=table.labels[label])
        axis.grid()
    handles = {name: line for axis in axes for line, name in zip(*axis.get_legend_handles_labels())}
    shown = {textwrap.fill(name, 70): line for name, line in handles.items()}
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", frameon=False)
    return figure


def draw_rate_line(
    axis: Axes, best: Row, cells: Sequence[Cell], shift: float, look: dict[str, Any]
) -> None:
    """One model on one task: rate times `shift` against score."""
    scored = sorted((cell for cell in cells if cell.scored), key=lambda cell: cell.rate)
    means = [np.mean(list(cell.headlines.values())) for cell in scored]
    name = best.name.replace(BEST.format(best.key.rates), "").replace(", , ", ", ").rstrip(", ")
    dash = "--" if best.key.mnli else "-"
    axis.plot([x.rate * shift for x in scored], means, dash, color=look["color"], label=name,
              marker=look["fmt"])  # fmt: skip
    for cell in scored:
        mark(axis, cell.rate * shift, cell.headlines.values(), upright=True, **look)


def finish(axis: Axes, title: str, unit: str, names: Sequence[str]) -> None:
    """A panel whose rows have names and go from above."""
    axis.set_title(title)
    axis.set_xlabel(unit)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="x")
