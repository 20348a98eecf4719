"""Loss curves of one or several runs: `python -m train.curves --runs '[runs/a, runs/b]'`.

Training loss faint (the mean of each logging interval), held-out loss with markers, against tokens
and against wall-clock; the numbers go into a JSON file beside the picture.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

from train.launch import run_command
from train.settings import InputError, require

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class CurvesSettings:
    """Draw the loss curves of runs."""

    runs: list[str]
    """Run folders, as [runs/a, runs/b]; each holds a log.jsonl."""
    output: str = "results/curves.png"
    """Picture to write, .png or .svg; the numbers go beside it, ending in .json."""
    title: str = "Masked-LM loss"
    """Heading of the picture."""


def read_log(run: str) -> tuple[Rows, Rows]:
    """Training rows and evaluation rows of a run.

    Raises:
        InputError: It has no log, or none of either kind yet.
    """
    file = Path(run) / "log.jsonl"
    require(file.is_file(), "runs", "must hold a log.jsonl", run, "name folders under run.folder")
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    training = [row for row in rows if "loss" in row]
    held_out = [row for row in rows if "validation_loss" in row]
    if not training or not held_out:
        raise InputError(f"runs must have logged and evaluated, got {run}; wait, or run it longer")
    return training, held_out


def at_equal(key: str, runs: dict[str, tuple[Rows, Rows]]) -> dict[str, Any]:
    """Held-out loss of each run where all have got to: the same tokens, or the same time.

    Args:
        key: "tokens" or "seconds".
        runs: Rows by name.

    Returns:
        The place reached by all, and the losses there; between two evaluations interpolated.
    """
    reached = min(held_out[-1][key] for _, held_out in runs.values())
    losses = {name: _loss_at(key, held_out, reached) for name, (_, held_out) in runs.items()}
    return {key: reached, "validation_loss": losses}


def _loss_at(key: str, held_out: Rows, reached: float) -> float:
    places, losses = columns(held_out, key, "validation_loss")
    return float(np.interp(reached, places, losses))


def columns(rows: Rows, *keys: str) -> tuple[NDArray[np.float64], ...]:
    """Values of some keys over rows."""
    return tuple(np.array([row[key] for row in rows], dtype=np.float64) for key in keys)


def draw(runs: dict[str, tuple[Rows, Rows]], title: str, output: Path) -> None:
    """Write the picture."""
    mpl.use("Agg")  # no screen is needed
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for axis, (key, unit, label) in zip(
        axes, (("tokens", 1e6, "tokens (millions)"), ("seconds", 60, "wall-clock (minutes)"))
    ):
        for number, (name, (training, held_out)) in enumerate(runs.items()):
            x, loss = columns(training, key, "loss")
            axis.plot(x / unit, loss, color=f"C{number}", alpha=0.3, linewidth=1)
            x, loss = columns(held_out, key, "validation_loss")
            marks = {"marker": "o", "markersize": 3.5, "color": f"C{number}"}
            axis.plot(x / unit, loss, label=f"{name} ({loss[-1]:.3f} at the end)", **marks)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("loss (nats a predicted token)")
    axes[0].legend(title="held out (dots); training (faint)", frameon=False)
    figure.suptitle(title)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
    plt.close(figure)


def main(settings: CurvesSettings) -> None:
    """Read, draw, write the numbers, say where."""
    runs = {Path(run).name: read_log(run) for run in settings.runs}
    output = Path(settings.output)
    rule = "must end in .png or .svg"
    require(output.suffix in (".png", ".svg"), "output", rule, settings.output, "rename it")
    draw(runs, settings.title, output)
    numbers = {
        "at_equal_tokens": at_equal("tokens", runs),
        "at_equal_time": at_equal("seconds", runs),
        "runs": {name: {"training": t, "held_out": h} for name, (t, h) in runs.items()},
    }
    output.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    for key, unit, name in (("tokens", 1e6, "M tokens"), ("seconds", 60, "minutes")):
        equal = at_equal(key, runs)
        losses = ", ".join(f"{n} {v:.3f}" for n, v in equal["validation_loss"].items())
        print(f"held-out loss at {equal[key] / unit:.1f} {name}: {losses}")
    print(f"curves: {output}")


if __name__ == "__main__":
    run_command(main, CurvesSettings)
