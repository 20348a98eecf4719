"""What the project's pictures have in common: no screen, a grid, no frame, one set of colours.

matplotlib is imported only when something is drawn: a machine that only trains may lack it.
"""

from pathlib import Path
from typing import Any

from train.loop.atomic_dir import check_writable
from train.settings import require

COLOURS = (
    "tab:red", "tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown", "tab:gray",
    "tab:pink",
)  # fmt: skip


def require_picture(output: str) -> None:
    """Refuse a name that is no picture's, or in no folder of ours, before anything is measured.

    Raises:
        InputError: It does not end in .png or .svg, or could not be written.
    """
    fits = Path(output).suffix in (".png", ".svg")
    require(fits, "output", "must end in .png or .svg", output, "rename it")
    check_writable(Path(output).parent, "output")


def axes_of(rows: int, columns: int, width: float, height: float) -> list[Any]:
    """Empty axes in reading order, of one figure of that size in inches."""
    import matplotlib as mpl

    mpl.use("Agg")  # no screen is needed
    from matplotlib import pyplot as plt

    _, grid = plt.subplots(
        rows, columns, figsize=(width, height), layout="constrained", squeeze=False
    )
    for axis in grid.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return list(grid.flat)


def save(axes: list[Any], output: Path) -> None:
    """Write the figure of the axes, into a folder that is made if need be."""
    from matplotlib import pyplot as plt

    output.parent.mkdir(parents=True, exist_ok=True)
    axes[0].figure.savefig(output, dpi=130)
    plt.close(axes[0].figure)
