"""Loss curves of runs, as in Fig. 3 of the paper.

    python -m train.analysis.loss_curves --runs '[runs/rope-0, runs/bert-0, ...]'

Plots training loss (faint) and held-out loss (markers) against steps, tokens and time. Runs whose
names differ only in a last `-0`, `-1`, ... that is their `run.seed` are seeds of one model: a line
for the mean, a band for the range. For two models the difference is plotted seed by seed.
"""

import glob
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from train.atomic_dir import split_seed
from train.command_line import run_command
from train.data.vocabulary import BYTES
from train.plotting import COLOURS, check_figure_path, make_axes, save_figure
from train.settings import require

Floats = NDArray[np.float64]

NATS, BITS = "nats a predicted token", "bits a byte"

X_AXES = (("step", 1e3, "steps (thousands)"), ("tokens", 1e6, "tokens (millions)"),
          ("seconds", 60, "wall-clock (minutes)"))  # fmt: skip
"""Key of a log row, divisor, label."""


@dataclass(frozen=True)
class CurvesSettings:
    """Plot the loss curves of runs."""

    runs: list[str]
    """Run folders or globs of them, as [runs/a-0, runs/b-0] or ['runs/pair/*-?']."""
    output: str = "results/curves.png"
    """Figure to write, .png or .svg; the numbers are written beside it as .json."""
    title: str = "Masked-LM loss"
    """Title of the figure."""

    def __post_init__(self) -> None:
        check_figure_path(self.output)


@dataclass(frozen=True)
class Run:
    """Log of a run.

    Attributes:
        name: Name of its folder.
        training: Rows of log.jsonl with `loss`.
        held_out: Rows with `validation_loss`.
        parameters: Number of parameters, if known.
        bytewise: Whether its tokens are bytes.
        seed: `run.seed`, if known.
    """

    name: str
    training: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    parameters: int | None = None
    bytewise: bool = False
    seed: int | None = None


Models = Mapping[str, Mapping[int, Run]]


def all_runs(models: Models) -> list[Run]:
    """Return the runs of all models."""
    return [run for seeds in models.values() for run in seeds.values()]


def expand_globs(patterns: Sequence[str]) -> list[str]:
    """Replace every glob by the sorted paths it matches; each path is listed once."""
    found = [path for x in patterns for path in (sorted(glob.glob(x)) or [x])]
    return list(dict.fromkeys(found))


def read_runs(patterns: Sequence[str]) -> tuple[dict[str, dict[int, Run]], str]:
    """Read the logs of runs.

    Args:
        patterns: Run folders or globs.

    Returns:
        Model -> seed -> run, and the unit of the losses: `BITS` if all runs read bytes.

    Raises:
        InputError: A folder holds no run, or two runs have the same name.
    """
    require(len(patterns) > 0, "runs", "must name a run folder", "none", "add one")
    runs = [read_log(folder) for folder in expand_globs(patterns)]
    seeds_of_runs = {run.name: run.seed for run in runs}
    models = group_by_model([run.name for run in runs], "runs", seeds_of_runs)
    by_name = {run.name: run for run in runs}
    grouped = {m: {s: by_name[name] for s, name in seeds.items()} for m, seeds in models.items()}
    if not all(run.bytewise for run in runs):
        return grouped, NATS
    for run in runs:
        for key, rows in (("loss", run.training), ("validation_loss", run.held_out)):
            for row in rows:
                row[key] /= math.log(2)
    return grouped, BITS


def read_log(folder: str) -> Run:
    """Read log.jsonl, environment.json and settings.yaml of a run folder.

    Raises:
        InputError: It has no log, or nothing was logged or evaluated yet.
    """
    log, environment, settings = (
        Path(folder) / name for name in ("log.jsonl", "environment.json", "settings.yaml")
    )
    require(log.is_file(), "runs", "must hold a log.jsonl", folder, "name folders under run.folder")
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    training = [row for row in rows if "loss" in row]
    held_out = [row for row in rows if "validation_loss" in row]
    logged = bool(training and held_out)
    require(logged, "runs", "must have logged and evaluated", folder, "wait, or run it longer")
    known = json.loads(environment.read_text()) if environment.is_file() else {}
    given = yaml.safe_load(settings.read_text()) if settings.is_file() else {}
    return Run(
        name=Path(folder).name,
        training=training,
        held_out=held_out,
        parameters=known.get("parameters"),
        bytewise=given.get("corpus", {}).get("tokenizer") == BYTES,
        seed=given.get("run", {}).get("seed"),
    )


def group_by_model(
    names: Sequence[str], key: str = "models", known_seeds: Mapping[str, int | None] | None = None
) -> dict[str, dict[int, str]]:
    """Group runs that differ in their seed: `bert-0` and `bert-1` are seeds of `bert`.

    Args:
        names: Names of runs; one without a number is seed 0.
        key: Setting to name in an error.
        known_seeds: `run.seed` by name; another number in a name, as in `width-16`, is no seed.

    Returns:
        Model -> seed -> name.

    Raises:
        InputError: Two runs have the same model and seed.
    """
    models: dict[str, dict[int, str]] = defaultdict(dict)
    for name in names:
        model, seed = split_seed(name)
        if (known_seeds or {}).get(name) not in (None, seed):
            model, seed = name, 0
        unique = seed not in models[model]
        require(unique, key, "must have different names", f"{model} twice", "rename one")
        models[model][seed] = name
    return dict(models)


def losses_at_equal(key: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Held-out loss of every run at the last x that all have reached.

    Args:
        key: "tokens" or "seconds".
        runs: Logs.

    Returns:
        `key`: that x. `validation_loss`: name -> loss, interpolated between two evaluations; None
        if the run was first evaluated later.
    """
    x = min(run.held_out[-1][key] for run in runs)
    losses = {
        run.name: float(interpolate_loss(key, run, np.array([x]))[0])
        if run.held_out[0][key] <= x
        else None
        for run in runs
    }
    return {key: x, "validation_loss": losses}


def interpolate_loss(key: str, run: Run, x: Floats) -> Floats:
    """Held-out loss of a run at x, linear between two evaluations, [n]."""
    xs, losses = ([row[name] for row in run.held_out] for name in (key, "validation_loss"))
    return np.asarray(np.interp(x, xs, losses))


def shared_x(key: str, runs: Sequence[Run]) -> Floats:
    """Evaluations of the first run in the range of `key` that all runs cover, [n]."""
    x = np.array([row[key] for row in runs[0].held_out], dtype=np.float64)
    start = max(run.held_out[0][key] for run in runs)
    end = min(run.held_out[-1][key] for run in runs)
    return np.unique(x.clip(start, end)) if start <= end else x[:0]


def paired_difference(first: Mapping[int, Run], second: Mapping[int, Run]) -> dict[str, Any] | None:
    """Held-out loss of the first model minus that of the second at equal tokens, seed by seed.

    Returns:
        `tokens` [n]; `by_seed`: seed -> differences [n]; `mean_at_end` and `std_at_end`, the sample
        standard deviation over seeds. None if the models share no seed.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    tokens = shared_x("tokens", [runs[seed] for seed in seeds for runs in (first, second)])
    by_seed = {
        seed: interpolate_loss("tokens", first[seed], tokens)
        - interpolate_loss("tokens", second[seed], tokens)
        for seed in seeds
    }
    last = [float(values[-1]) for values in by_seed.values()] if len(tokens) else []
    return {
        "tokens": tokens.tolist(),
        "by_seed": {seed: values.tolist() for seed, values in by_seed.items()},
        "mean_at_end": float(np.mean(last)) if last else None,
        "std_at_end": float(np.std(last, ddof=1)) if len(last) > 1 else None,
    }


def plot(models: Models, unit: str, title: str, output: Path) -> None:
    """Plot losses against steps, tokens and time, and the difference of two models."""
    *loss_axes, last_axis = axes = make_axes(2, 2, 10.5, 7.4)
    for axis, (key, scale, label) in zip(loss_axes, X_AXES):
        for (name, seeds), colour in zip(models.items(), COLOURS * len(models)):
            runs = list(seeds.values())
            for run in runs:
                x, losses = ([row[column] for row in run.training] for column in (key, "loss"))
                axis.plot(np.array(x) / scale, losses, color=colour, alpha=0.25, linewidth=0.8)
            plot_held_out(axis, key, scale, name, runs, colour)
        axis.set_xlabel(label)
        axis.set_ylabel(f"loss ({unit})")
    loss_axes[0].legend(title="held out (dots); training (faint)", frameon=False)
    pair = list(models.values())
    has_difference = len(pair) == 2 and plot_difference(last_axis, pair[0], pair[1], "black")
    last_axis.set_ylabel(f"held-out loss, {' − '.join(models)}")  # noqa: RUF001 the sign
    last_axis.set_visible(has_difference)
    last_axis.figure.suptitle(title)
    save_figure(axes, output)


def plot_held_out(
    axis: Any, key: str, scale: float, label: str, runs: Sequence[Run], colour: str
) -> None:
    """Plot the mean held-out loss over runs and its range."""
    x = shared_x(key, runs)
    losses = np.stack([interpolate_loss(key, run, x) for run in runs])  # [seeds, n]
    style = {"marker": "o", "markersize": 2.5, "linewidth": 1.2, "color": colour}
    axis.plot(x / scale, losses.mean(0), label=label, **style)
    if len(runs) > 1:
        axis.fill_between(x / scale, losses.min(0), losses.max(0), color=colour, alpha=0.2)


def plot_difference(
    axis: Any, first: Mapping[int, Run], second: Mapping[int, Run], colour: str
) -> bool:
    """Plot the paired difference of two models, mean and range; returns whether there is one."""
    difference = paired_difference(first, second)
    axis.axhline(0, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlabel("tokens (millions); band: range over seeds")
    if difference is None or not difference["tokens"]:
        return False
    tokens = np.array(difference["tokens"]) / 1e6
    values = np.array(list(difference["by_seed"].values()))  # [seeds, n]
    axis.plot(tokens, values.mean(0), color=colour, marker="o", markersize=2.5, linewidth=1.2)
    axis.fill_between(tokens, values.min(0), values.max(0), color=colour, alpha=0.2)
    return True


def main(settings: CurvesSettings) -> None:
    """Read the runs, plot, write the numbers, print losses at equal tokens and time."""
    output = Path(settings.output)
    models, unit = read_runs(settings.runs)
    runs = all_runs(models)
    plot(models, unit, settings.title, output)
    numbers = {
        "unit": unit,
        "at_equal_tokens": losses_at_equal("tokens", runs),
        "at_equal_time": losses_at_equal("seconds", runs),
        "difference": paired_difference(*models.values()) if len(models) == 2 else None,
        "runs": {run.name: {"training": run.training, "held_out": run.held_out} for run in runs},
    }
    output.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    for key, scale, name in (("tokens", 1e6, "M tokens"), ("seconds", 60, "minutes")):
        equal = losses_at_equal(key, runs)
        losses = equal["validation_loss"].items()
        listed = ", ".join(f"{n} {'not measured' if v is None else f'{v:.3f}'}" for n, v in losses)
        print(f"held-out loss at {equal[key] / scale:.1f} {name}: {listed}")
    print(f"figure: {output}")


if __name__ == "__main__":
    run_command(main, CurvesSettings)
