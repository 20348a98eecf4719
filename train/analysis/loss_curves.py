"""Loss curves of runs, as in Fig. 3 of the paper, and their losses in a table.

    python -m train.analysis.loss_curves --runs '[runs/rope-0, runs/bert-0, ...]'

Runs whose names differ only in a last `-0`, `-1`, ... that is their `run.seed` are seeds of one
model: a line for the mean, a band for the range. Every other model is compared with the first, seed
by seed. Intervals are Student's t over pretraining seeds, 95 %: they cover the variation between
seeds, not between texts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import NDArray

from train.command_line import run_command
from train.data.vocabulary import BYTES
from train.intervals import t_interval
from train.loop.run_log import read_log
from train.loop.run_metadata import read_metadata
from train.plotting import COLORS, check_figure_path, make_axes, save_figure
from train.run_names import find_folders, model_and_seed
from train.settings import InputError
from train.tables import markdown_table

Floats = NDArray[np.float64]
Row = dict[str, Any]

X_AXES = (("tokens", 1e6, "tokens (millions)"), ("seconds", 60, "wall-clock (minutes)"))
"""Key of a log row, divisor, label."""


@dataclass(frozen=True)
class CurvesSettings:
    """Plot the loss curves of runs and compare their losses."""

    runs: list[str]
    """Run folders or globs of them, as [runs/a-0, runs/b-0] or ['runs/pair/*-?']; every other model
    is compared with the first."""
    output: str = "runs/curves.png"
    """Figure to write, .png or .svg; table and numbers are written beside it as .md and .json."""
    title: str = "Masked-LM loss"
    """Title of the figure."""
    wall_clock: bool = True
    """Plot the loss against minutes too; false for runs that shared a machine."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise InputError("runs must name a folder, got none; write [runs/a-0, runs/b-0]")
        check_figure_path(self.output)


@dataclass(frozen=True)
class Run:
    """Log of a run: rows of log.jsonl with `loss` and, held out, with `validation_loss`."""

    name: str
    training: pd.DataFrame
    held_out: pd.DataFrame
    parameters: int | None
    bytewise: bool


Models = Mapping[str, Mapping[int, Run]]
"""Model -> seed -> run."""


def main(settings: CurvesSettings) -> None:
    """Read the runs, plot, write numbers and table, print the table."""
    models, unit = read_runs(settings.runs)
    runs = [run for seeds in models.values() for run in seeds.values()]
    ends = {key: min(float(run.held_out[key].iloc[-1]) for run in runs) for key, *_ in X_AXES}
    rows = summarize(models, ends)
    plot(models, settings, unit)
    table, output = format_table(rows, ends, unit), Path(settings.output)
    output.with_suffix(".md").write_text(table + "\n")
    logs = {run.name: json.loads(run.held_out.to_json(orient="records")) for run in runs}
    numbers = {"unit": unit, "compared_at": ends, "models": rows, "held_out": logs}
    output.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(table)
    print(f"figure: {output}")


def read_runs(patterns: Sequence[str]) -> tuple[Models, str]:
    """Read the logs of runs, and the unit of their losses: bits a byte if all runs read bytes.

    Raises:
        InputError: A folder holds no run, or two runs have the same model and seed.
    """
    models: dict[str, dict[int, Run]] = {}
    for folder in find_folders(patterns, "runs").values():
        model, seed = model_and_seed(folder)
        seeds = models.setdefault(model, {})
        if seed in seeds:
            raise InputError(
                f"runs must differ in model or seed, got two of {model} with seed {seed}; drop one"
            )
        seeds[seed] = read_run(folder)
    runs = [run for seeds in models.values() for run in seeds.values()]
    if not all(run.bytewise for run in runs):
        return models, "nats a predicted token"
    for run in runs:
        run.training["loss"] /= math.log(2)
        run.held_out["validation_loss"] /= math.log(2)
    return models, "bits a byte"


def read_run(folder: str) -> Run:
    """Read log.jsonl, environment.json and settings.yaml of a run folder."""
    run = Path(folder)
    names = ("log.jsonl", "environment.json", "settings.yaml")
    if not all((run / name).is_file() for name in names):
        rule = f"must hold {', '.join(names)}"
        raise InputError(f"runs {rule}, got {folder}; name folders under run.folder")
    rows = read_log(run / "log.jsonl")
    training = pd.DataFrame([row for row in rows if "loss" in row])
    held_out = pd.DataFrame([row for row in rows if "validation_loss" in row])
    if training.empty or held_out.empty:
        raise InputError(
            f"runs must have logged and evaluated, got {folder}; wait, or run it longer"
        )
    parameters = read_metadata(run / "environment.json").get("parameters")
    settings = read_metadata(run / "settings.yaml")
    bytewise = settings.get("corpus", {}).get("tokenizer") == BYTES
    return Run(run.name, training, held_out, parameters, bytewise)


def losses_at(key: str, runs: Sequence[Run], x: Floats) -> Floats:
    """Interpolate held-out losses at x [n] tokens or seconds, [runs, n]; NaN before the first."""
    logs = [run.held_out for run in runs]
    return np.stack([np.interp(x, y[key], y["validation_loss"], left=np.nan) for y in logs])


def shared_x(key: str, runs: Sequence[Run]) -> Floats:
    """Evaluations of the first run in the range of `key` that all runs cover, [n]."""
    x = runs[0].held_out[key].to_numpy(dtype=np.float64)
    start = max(run.held_out[key].iloc[0] for run in runs)
    end = min(run.held_out[key].iloc[-1] for run in runs)
    return np.unique(x.clip(start, end)) if start <= end else x[:0]


def paired_difference(first: Mapping[int, Run], second: Mapping[int, Run]) -> tuple[Floats, Floats]:
    """Tokens [n], and held-out loss of the first model minus that of the second [seeds, n].

    Both are empty if the models share no seed.
    """
    pairs = [[runs[seed] for seed in first if seed in second] for runs in (first, second)]
    if not pairs[0]:
        return np.empty(0), np.empty((0, 0))
    x = shared_x("tokens", pairs[0] + pairs[1])
    return x, losses_at("tokens", pairs[0], x) - losses_at("tokens", pairs[1], x)


def summarize(models: Models, ends: Mapping[str, float]) -> list[Row]:
    """Summarize each model in a row of the .json file: speed, losses, difference from the first.

    Losses are compared at the `ends`, tokens and seconds that all runs have reached.
    """
    rows: list[Row] = []
    first: dict[int, float] = {}  # seed -> loss of the first model
    for model, seeds in models.items():
        runs = list(seeds.values())
        at = {key: losses_at(key, runs, np.array([x]))[:, 0] for key, x in ends.items()}
        losses = dict(zip(seeds, at["tokens"]))
        differences = np.array([first[seed] - losses[seed] for seed in seeds if seed in first])
        first = first or losses
        speeds = [run.training["tokens_per_second"].median() for run in runs]
        rows.append(
            {
                "model": model,
                "seeds": len(runs),
                "parameters": runs[0].parameters,
                "tokens_per_second": summary(speeds),
                "at_equal_tokens": summary(at["tokens"]),
                "first_minus_it": summary(differences[~np.isnan(differences)]),
                "at_equal_time": summary(at["seconds"]),
            }
        )
    return rows


def summary(values: Sequence[float] | Floats) -> Row | None:
    """Mean, half of its 95 % t interval (None for one value), values; None for NaN or nothing."""
    if len(values) == 0 or np.isnan(values).any():
        return None
    half = None
    if len(values) > 1:
        low, high = t_interval(values)
        half = (high - low) / 2
    return {"mean": float(np.mean(values)), "half": half, "values": [float(x) for x in values]}


def format_table(rows: list[Row], ends: Mapping[str, float], unit: str) -> str:
    """Format the rows of `summarize` as a Markdown table."""
    body = []
    for row in rows:
        size = row["parameters"]
        cells = {
            "model": row["model"],
            "seeds": str(row["seeds"]),
            "parameters": f"{size:,}" if size else "",
            "tokens/s": format_interval(row["tokens_per_second"], ",.0f"),
            f"loss at {ends['tokens'] / 1e6:.1f} M tokens": format_interval(row["at_equal_tokens"]),
            f"{rows[0]['model']} − it": format_interval(row["first_minus_it"], "+.3f"),  # noqa: RUF001 the sign
            f"loss at {ends['seconds'] / 60:.1f} min": format_interval(row["at_equal_time"]),
        }
        body.append(cells)
    note = f"Held-out loss in {unit}; mean ± half of the 95 % t interval over seeds of pretraining."
    return f"{markdown_table(pd.DataFrame(body))}\n\n{note}"


def format_interval(interval: Row | None, digits: str = ".3f") -> str:
    """Format an interval as mean ± half width."""
    if interval is None:
        return ""
    mean, half = f"{interval['mean']:{digits}}", interval["half"]
    return mean if half is None else f"{mean} ± {half:{digits.replace('+', '')}}"


def plot(models: Models, settings: CurvesSettings, unit: str) -> None:
    """Plot losses against tokens and time, and differences from the first model."""
    first, *others = models
    x_axes = X_AXES if settings.wall_clock else X_AXES[:1]
    panels = len(x_axes) + bool(others)
    figure, axes = make_axes(1, panels, 3.7 * panels, 3.3)
    colors = dict(zip(models, COLORS * len(models)))
    for axis, (key, scale, label) in zip(axes, x_axes):
        for model, seeds in models.items():
            runs = list(seeds.values())
            for run in runs:
                x, losses = run.training[key] / scale, run.training["loss"]
                axis.plot(x, losses, color=colors[model], alpha=0.25, linewidth=0.8)
            x = shared_x(key, runs)
            plot_band(axis, x / scale, losses_at(key, runs, x), colors[model], label=model)
        axis.set_xlabel(label)
        axis.set_ylabel(f"loss ({unit})")
    axes[0].legend(title="held out (dots); training (faint)")
    for difference in axes[len(x_axes) :]:
        for model in others:
            x, differences = paired_difference(models[first], models[model])
            if differences.size:
                plot_band(difference, x / 1e6, differences, colors[model])
        difference.axhline(0, color="black", linewidth=0.8, linestyle=":")
        difference.set_xlabel("tokens (millions); band: range over seeds")
        difference.set_ylabel(f"{first} − other, below 0: better")  # noqa: RUF001 the sign
    figure.suptitle(settings.title)
    save_figure(figure, Path(settings.output))


def plot_band(axis: Axes, x: Floats, values: Floats, color: str, label: str | None = None) -> None:
    """Plot the mean of values [seeds, n] over seeds, and their range."""
    axis.plot(x, values.mean(0), label=label, marker="o", markersize=2.5, color=color)
    axis.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.2)


if __name__ == "__main__":
    run_command(main, CurvesSettings)
