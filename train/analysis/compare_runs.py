"""Many models in one table and one figure.

    python -m train.analysis.compare_runs --runs '[runs/e/rope-?, runs/e/*-?]'

Runs whose names differ only in their seed are one model. Every other model is compared with the
first, seed by seed. Intervals are Student's t over pretraining seeds, 95 %: they cover the
variation between seeds, not between texts.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from train.analysis.length_extrapolation import (
    REFUSED_LABEL,
    UNCHANGED,
    losses_by_length,
    plot_losses_by_length,
)
from train.analysis.loss_curves import (
    NATS,
    Models,
    Run,
    all_runs,
    losses_at_equal,
    plot_difference,
    plot_held_out,
    read_runs,
)
from train.command_line import run_command
from train.plotting import COLOURS, check_figure_path, make_axes, save_figure
from train.settings import InputError, require
from train.tables import markdown_table

Row = dict[str, Any]


@dataclass(frozen=True)
class CompareSettings:
    """Compare runs of several models."""

    runs: list[str]
    """Run folders or globs, as [runs/a-0, runs/b-0, runs/a-1, runs/b-1]; every other model is
    compared with the first."""
    lengths: str | None = None
    """The .json that `train.analysis.length_extrapolation` wrote for the same models."""
    output: str = "results/contest.png"
    """Figure to write; the table is written beside it as .md, and the numbers as .json."""
    title: str = "One model, several encodings of position"
    """Title of the figure."""

    def __post_init__(self) -> None:
        check_figure_path(self.output)


def t_interval(values: Sequence[float]) -> Row:
    """Mean, half width of its 95 % t interval (None for a single value), and the values."""
    n = len(values)
    half = float(stats.t.ppf(0.975, n - 1) * stats.sem(values)) if n > 1 else None
    return {"mean": float(np.mean(values)), "half": half, "values": list(values)}


def interval_of_losses(losses: dict[str, float | None], runs: Sequence[Run]) -> Row | None:
    """Interval of the losses of some runs, by name; None if one of them has no loss."""
    values = [loss for run in runs if (loss := losses[run.name]) is not None]
    return t_interval(values) if len(values) == len(runs) else None


def summarize(models: Models, lengths: list[Row]) -> list[Row]:
    """Summarize each model: speed, losses, and difference from the first.

    Args:
        models: Runs.
        lengths: Rows of `length_extrapolation`, or none.

    Returns:
        A row for each model; the keys are those of the .json file.
    """
    at_tokens, at_seconds = (
        losses_at_equal(key, all_runs(models))["validation_loss"] for key in ("tokens", "seconds")
    )
    by_length = losses_by_length(lengths)
    first = next(iter(models.values()))
    rows = []
    for model, seeds in models.items():
        own = list(seeds.values())
        paired = [seed for seed in seeds if seed in first and seeds is not first]
        pairs = [(at_tokens[first[seed].name], at_tokens[seeds[seed].name]) for seed in paired]
        differences = [a - b for a, b in pairs if a is not None and b is not None]
        speeds = [np.median([row["tokens_per_second"] for row in run.training]) for run in own]
        rows.append(
            {
                "model": model,
                "parameters": own[0].parameters,
                "tokens_per_second": t_interval([float(speed) for speed in speeds]),
                "at_equal_tokens": interval_of_losses(at_tokens, own),
                "first_minus_it": t_interval(differences) if differences else None,
                "at_equal_time": interval_of_losses(at_seconds, own),
                "at_length": {
                    length: t_interval(losses) if losses else "refused"
                    for length, losses in by_length.get((model, UNCHANGED), {}).items()
                },
            }
        )
    return rows


def format_table(rows: list[Row], models: Models, unit: str) -> str:
    """Format the rows of `summarize` as a Markdown table."""
    tokens = losses_at_equal("tokens", all_runs(models))["tokens"] / 1e6
    minutes = losses_at_equal("seconds", all_runs(models))["seconds"] / 60
    lengths = sorted({length for row in rows for length in row["at_length"]})
    header = ["model", "seeds", "parameters", "tokens/s", f"loss at {tokens:.1f} M tokens"]
    header += [f"{rows[0]['model']} − it", f"loss at {minutes:.1f} min"]  # noqa: RUF001 the sign
    header += [f"at length {length}" for length in lengths]
    body = []
    for row in rows:
        size = row["parameters"]
        cells = [row["model"], str(len(models[row["model"]])), f"{size:,}" if size else ""]
        cells += [format_interval(row["tokens_per_second"], ",.0f")]
        cells += [format_interval(row["at_equal_tokens"])]
        cells += [format_interval(row["first_minus_it"], "+.3f")]
        cells += [format_interval(row["at_equal_time"])]
        cells += [format_interval(row["at_length"].get(length)) for length in lengths]
        body.append(cells)
    note = f"Held-out loss in {unit}; mean ± half of the 95 % t interval over seeds of pretraining."
    return f"{markdown_table(header, body)}\n\n{note}"


def format_interval(interval: Row | str | None, digits: str = ".3f") -> str:
    """Format an interval as mean ± half width."""
    if interval is None or isinstance(interval, str):
        return interval or ""
    half = interval["half"]
    half = "" if half is None else f" ± {half:{digits.replace('+', '')}}"
    return f"{interval['mean']:{digits}}{half}"


def plot(models: Models, lengths: list[Row], settings: CompareSettings, unit: str) -> None:
    """Plot loss against tokens, differences from the first model, and loss against length."""
    axes = make_axes(1, 3 if lengths else 2, 15 if lengths else 10.5, 5.2)
    colours = dict(zip(models, COLOURS * len(models)))
    first, *others = models
    for model, seeds in models.items():
        plot_held_out(axes[0], "tokens", 1e6, model, list(seeds.values()), colours[model])
    for model in others:
        plot_difference(axes[1], models[first], models[model], colours[model])
    axes[0].set_ylabel(f"held-out loss ({unit})")
    axes[1].set_ylabel(f"{first} − the other; below 0 {first} is better")  # noqa: RUF001 the sign
    axes[0].set_xlabel("tokens (millions); band: range over seeds")
    legend = {"loc": "outside lower center", "ncols": len(models), "frameon": False}
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), **legend)
    if lengths:
        unchanged = [row for row in lengths if row["way"] == UNCHANGED]
        # the shortest length is that of training: models are not rescaled there
        plot_losses_by_length(axes[2], unchanged, min(row["length"] for row in unchanged), models)
        crosses = [x for x in zip(*axes[2].get_legend_handles_labels()) if REFUSED_LABEL in x[1]]
        if crosses:  # lines are in the legend of the figure
            axes[2].legend(*zip(*crosses), frameon=False, fontsize=8)
    axes[0].figure.suptitle(settings.title)
    save_figure(axes, Path(settings.output))


def read_lengths(file: str | None) -> list[Row]:
    """Read the rows that `length_extrapolation` wrote; none for None.

    Raises:
        InputError: There is no such file, or it holds something else.
    """
    if file is None:
        return []
    try:
        rows = json.loads(Path(file).read_text())
        losses_by_length(rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = "lengths must be a .json of train.analysis.length_extrapolation"
        raise InputError(f"{rule}, got {file} ({error!r}); run that command first") from error
    return rows


def main(settings: CompareSettings) -> None:
    """Read the runs, plot, write numbers and table, print the table."""
    models, unit = read_runs(settings.runs)
    require(len(models) > 1, "runs", "must be of two models or more", len(models), "add another")
    lengths = read_lengths(settings.lengths)
    known_unit = not lengths or unit == NATS
    require(known_unit, "lengths", "must be null for runs on bytes", settings.lengths, "drop it")
    rows = summarize(models, lengths)
    plot(models, lengths, settings, unit)
    output = Path(settings.output)
    table = format_table(rows, models, unit)
    output.with_suffix(".md").write_text(table + "\n")
    logs = {run.name: run.held_out for run in all_runs(models)}
    numbers = {"unit": unit, "models": rows, "held_out": logs}
    output.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(table)
    print(f"figure: {output}")


if __name__ == "__main__":
    run_command(main, CompareSettings)
