"""Figures of pretraining and fine-tuning: one style, one set of colours, no display."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train.atomic_dir import check_writable
from train.settings import InputError

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")
"""Okabe and Ito's palette, which colour-blind readers can tell apart; grey instead of yellow."""

mpl.rcParams.update(
    {
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 9,
        "font.size": 9,
        "grid.alpha": 0.3,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "lines.linewidth": 1.2,
        "text.parse_math": False,
    }
)


def check_figure_path(output: str) -> None:
    """Check the name and folder of a figure before anything is measured."""
    if Path(output).suffix not in (".png", ".svg"):
        raise InputError(f"output must end in .png or .svg, got {output}; rename it")
    check_writable(Path(output).parent, "output")


def make_axes(
    rows: int, columns: int, width: float, height: float, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure of this size in inches and its empty axes, row by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    return figure, axes.flatten().tolist()


def save_figure(figure: Figure, output: Path) -> None:
    """Write a figure; its folder is created if needed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
