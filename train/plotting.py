"""Figures: one style, one set of colours, no display.

matplotlib is imported when a figure is drawn, because a machine that only trains may lack it.
"""

from pathlib import Path
from typing import Any

from train.atomic_dir import check_writable
from train.settings import require

COLOURS = (
    "tab:red", "tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown", "tab:gray",
    "tab:pink",
)  # fmt: skip


def check_figure_path(output: str) -> None:
    """Check the name and folder of a figure before anything is measured.

    Raises:
        InputError: It does not end in .png or .svg, or its folder is not writable.
    """
    known = Path(output).suffix in (".png", ".svg")
    require(known, "output", "must end in .png or .svg", output, "rename it")
    check_writable(Path(output).parent, "output")


def make_axes(rows: int, columns: int, width: float, height: float) -> list[Any]:
    """Return empty axes, row by row, of a figure of this size in inches."""
    import matplotlib as mpl

    mpl.use("Agg")  # draws without a display
    from matplotlib import pyplot as plt

    _, grid = plt.subplots(
        rows, columns, figsize=(width, height), layout="constrained", squeeze=False
    )
    for axis in grid.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return list(grid.flat)


def save_figure(axes: list[Any], output: Path) -> None:
    """Write the figure of the axes and close it; the folder is created if needed."""
    from matplotlib import pyplot as plt

    output.parent.mkdir(parents=True, exist_ok=True)
    axes[0].figure.savefig(output, dpi=130)
    plt.close(axes[0].figure)
