"""Loss curves, after the paper's Fig. 3: `python -m train.analysis.loss_curves --runs '[A, B]'`.

Training loss faint (the mean of each logging interval), held-out loss with markers, against steps,
tokens and wall-clock. Runs whose names differ in a last `-0`, `-1`, ..., their `run.seed`, are
seeds of one model: a line for their mean, a band for their range. Of two models the difference is
drawn too, seed by seed. The numbers go into a JSON file beside the picture. Where all runs read
bytes, losses are bits a byte.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from train.analysis.plotting import COLOURS, check_figure_path, make_axes, save_figure
from train.data.vocabulary import BYTES
from train.loop.atomic_dir import split_seed
from train.loop.launch import run_command
from train.settings import InputError, require

Rows = list[dict[str, Any]]
Floats = NDArray[np.float64]

NATS, BITS = "nats a predicted token", "bits a byte"

AXES = (("step", 1e3, "steps (thousands)"), ("tokens", 1e6, "tokens (millions)"),
        ("seconds", 60, "wall-clock (minutes)"))  # fmt: skip


@dataclass(frozen=True)
class CurvesSettings:
    """Draw the loss curves of runs."""

    runs: list[str]
    """Run folders, as [runs/a, runs/b] or seeds as [runs/a-0, runs/b-0, runs/a-1, runs/b-1]; each
    holds a log.jsonl."""
    output: str = "results/curves.png"
    """Picture to write, .png or .svg; the numbers go beside it, ending in .json."""
    title: str = "Masked-LM loss"
    """Heading of the picture."""


@dataclass(frozen=True)
class Run:
    """What a run has logged."""

    name: str
    training: Rows
    held_out: Rows
    parameters: int | None = None
    bytewise: bool = False
    seed: int | None = None


def read_runs(folders: Sequence[str]) -> tuple[dict[str, dict[int, Run]], str]:
    """Model -> seed -> run, and the unit of the losses.

    Raises:
        InputError: A folder holds no run, or two runs have one name.
    """
    require(len(folders) > 0, "runs", "must name a run folder", "none", "give one")
    runs = {Path(folder).name: read_log(folder) for folder in folders}
    models = by_model([Path(folder).name for folder in folders], "runs", runs)
    unit = NATS
    if all(run.bytewise for run in runs.values()):
        runs, unit = {name: in_bits(run) for name, run in runs.items()}, BITS
    return {
        m: {seed: runs[name] for seed, name in seeds.items()} for m, seeds in models.items()
    }, unit


def in_bits(run: Run) -> Run:
    """The run with its losses divided by ln 2."""
    training, held_out = (
        [row | {key: row[key] / math.log(2)} for row in rows]
        for rows, key in ((run.training, "loss"), (run.held_out, "validation_loss"))
    )
    return replace(run, training=training, held_out=held_out)


def read_log(run: str) -> Run:
    """Training rows and evaluation rows of a run, and what else is known of it.

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
    about = Path(run) / "environment.json"
    parameters = json.loads(about.read_text()).get("parameters") if about.is_file() else None
    file = Path(run) / "settings.yaml"
    settings = yaml.safe_load(file.read_text()) if file.is_file() else {"corpus": {}}
    bytewise = settings["corpus"].get("tokenizer") == BYTES
    seed = settings.get("run", {}).get("seed")
    return Run(Path(run).name, training, held_out, parameters, bytewise, seed)


def by_model(
    names: Sequence[str], key: str = "models", runs: Mapping[str, Run] | None = None
) -> dict[str, dict[int, str]]:
    """Model -> seed -> name: `bert-0` and `bert-1` are seeds of `bert`; `bert` alone is seed 0.

    Args:
        names: Of runs.
        key: The setting that names them.
        runs: What is known of them: the 4 of `rate-1e-4` or the 16 of `width-16` is no seed.
    """
    models: dict[str, dict[int, str]] = defaultdict(dict)
    for name in names:
        model, seed = split_seed(name)
        if runs and runs[name].seed not in (None, seed):
            model, seed = name, 0
        rule = "must have names of their own"
        require(seed not in models[model], key, rule, f"{model} twice", "rename one")
        models[model][seed] = name
    return dict(models)


def at_equal(key: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Held-out loss of each run where all have got to: the same tokens, or the same time.

    Args:
        key: "tokens" or "seconds".
        runs: What they logged.

    Returns:
        The place reached by all, and the losses there; between two evaluations interpolated, None
        before the first.
    """
    reached = min(run.held_out[-1][key] for run in runs)
    losses = {
        run.name: float(losses_at(key, run, np.array([reached]))[0])
        if run.held_out[0][key] <= reached
        else None
        for run in runs
    }
    return {key: reached, "validation_loss": losses}


def losses_at(key: str, run: Run, places: Floats) -> Floats:
    """Held-out loss at some places, between two evaluations interpolated, [places]."""
    x, losses = columns(run.held_out, key, "validation_loss")
    return np.asarray(np.interp(places, x, losses))


def columns(rows: Rows, *keys: str) -> tuple[Floats, ...]:
    """Values of some keys over rows."""
    return tuple(np.array([row[key] for row in rows], dtype=np.float64) for key in keys)


def common_places(key: str, runs: Sequence[Run]) -> Floats:
    """Where the first run was evaluated, from where all runs have been to where all have got."""
    (places,) = columns(runs[0].held_out, key)
    starts = max(run.held_out[0][key] for run in runs)
    ends = min(run.held_out[-1][key] for run in runs)
    return np.unique(places.clip(starts, ends)) if starts <= ends else places[:0]


def difference(first: Mapping[int, Run], second: Mapping[int, Run]) -> dict[str, Any] | None:
    """First model - second at equal tokens, for each seed that both have; None without any.

    Returns:
        tokens [places]; by_seed: seed -> differences [places]; and of the last place mean and, of
        several seeds, sample standard deviation.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    tokens = common_places("tokens", [side[seed] for seed in seeds for side in (first, second)])
    table = {
        seed: losses_at("tokens", first[seed], tokens) - losses_at("tokens", second[seed], tokens)
        for seed in seeds
    }
    last = np.array([values[-1] for values in table.values()]) if len(tokens) else np.empty(0)
    return {
        "tokens": tokens.tolist(),
        "by_seed": {seed: values.tolist() for seed, values in table.items()},
        "mean_at_end": float(last.mean()) if len(last) else None,
        "std_at_end": float(last.std(ddof=1)) if len(last) > 1 else None,
    }


def draw(models: Mapping[str, Mapping[int, Run]], unit: str, title: str, output: Path) -> None:
    """Write the picture."""
    axes = make_axes(2, 2, 10.5, 7.4)
    *losses, last = axes
    for axis, (key, scale, label) in zip(losses, AXES):
        for (name, seeds), colour in zip(models.items(), COLOURS * len(models)):
            runs = list(seeds.values())
            draw_training(axis, key, scale, runs, colour)
            draw_held_out(axis, key, scale, last_loss(name, runs), runs, colour)
        axis.set_xlabel(label)
        axis.set_ylabel(f"loss ({unit})")
    losses[0].legend(title="held out (dots); training (faint)", frameon=False)
    last.set_visible(len(models) == 2 and draw_difference(last, models))
    last.figure.suptitle(title)
    save_figure(axes, output)


def last_loss(name: str, runs: Sequence[Run]) -> str:
    """A model in a legend: its last held-out loss that all of its runs have, and where that was."""
    shared = set.intersection(*({row["step"] for row in run.held_out} for run in runs))
    if not shared:
        return name
    ends = [row for run in runs for row in run.held_out if row["step"] == max(shared)]
    loss, tokens = (np.mean([end[key] for end in ends]) for key in ("validation_loss", "tokens"))
    many = f", mean of {len(runs)} seeds" if len(runs) > 1 else ""
    return f"{name} ({loss:.3f} at {tokens / 1e6:.1f} M tokens{many})"


def draw_training(axis: Any, key: str, scale: float, runs: Sequence[Run], colour: str) -> None:
    """Every run's training loss, faint."""
    for run in runs:
        x, loss = columns(run.training, key, "loss")
        axis.plot(x / scale, loss, color=colour, alpha=0.25, linewidth=0.8)


def draw_held_out(
    axis: Any, key: str, scale: float, label: str, runs: Sequence[Run], colour: str
) -> None:
    """The mean over runs of the held-out loss, and its range."""
    places = common_places(key, runs)
    table = np.stack([losses_at(key, run, places) for run in runs])  # [seeds, places]
    marks = {"marker": "o", "markersize": 2.5, "linewidth": 1.2, "color": colour}
    axis.plot(places / scale, table.mean(0), label=label, **marks)
    if len(runs) > 1:
        axis.fill_between(places / scale, table.min(0), table.max(0), color=colour, alpha=0.2)


def draw_difference(axis: Any, models: Mapping[str, Mapping[int, Run]]) -> bool:
    """First model - second against tokens; whether there is anything to draw."""
    (first, one), (second, other) = models.items()
    found = difference(one, other)
    if found is None or not found["tokens"]:
        return False
    tokens, table = np.array(found["tokens"]) / 1e6, np.array(list(found["by_seed"].values()))
    for values in table:
        axis.plot(tokens, values, color="tab:gray", alpha=0.6, linewidth=0.8)
    axis.plot(tokens, table.mean(0), color="black", marker="o", markersize=2.5, linewidth=1.2)
    if len(table) > 1:
        axis.fill_between(tokens, table.min(0), table.max(0), color="tab:gray", alpha=0.25)
    axis.axhline(0, color="black", linewidth=0.8, linestyle=":")
    spread = f"; mean and range of {len(table)} seeds" if len(table) > 1 else ""
    axis.set_xlabel(f"tokens (millions){spread}")
    axis.set_ylabel(f"held-out loss, {first} − {second}")  # noqa: RUF001 the sign
    return True


def main(settings: CurvesSettings) -> None:
    """Read, draw, write the numbers, say where."""
    output = Path(settings.output)
    check_figure_path(settings.output)
    models, unit = read_runs(settings.runs)
    runs = [run for seeds in models.values() for run in seeds.values()]
    draw(models, unit, settings.title, output)
    numbers = {
        "unit": unit,
        "at_equal_tokens": at_equal("tokens", runs),
        "at_equal_time": at_equal("seconds", runs),
        "difference": difference(*models.values()) if len(models) == 2 else None,
        "runs": {run.name: {"training": run.training, "held_out": run.held_out} for run in runs},
    }
    output.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    for key, scale, name in (("tokens", 1e6, "M tokens"), ("seconds", 60, "minutes")):
        equal = at_equal(key, runs)
        found = equal["validation_loss"].items()
        losses = ", ".join(f"{n} {'not measured' if v is None else f'{v:.3f}'}" for n, v in found)
        print(f"held-out loss at {equal[key] / scale:.1f} {name}: {losses}")
    print(f"curves: {output}")


if __name__ == "__main__":
    run_command(main, CurvesSettings)
