"""Many models side by side, in one table and one picture.

    python -m train.analysis.compare_runs --runs '[runs/e/rope-0, runs/e/t5-0, ...]'

Runs whose names differ in a last `-0`, `-1`, ... are seeds of one model. Each other model is
subtracted from the first, seed by seed. Intervals are Student's t over seeds of pretraining, 95 %:
they say what another seed would change, not what another text would.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from train.analysis.length_extrapolation import PLAIN, REFUSED, draw_on, means
from train.analysis.loss_curves import NATS, Run, at_equal, difference, draw_held_out, read_runs
from train.analysis.plotting import COLOURS, check_figure_path, make_axes, save_figure
from train.loop.launch import run_command
from train.settings import InputError, require

Models = Mapping[str, Mapping[int, Run]]
Row = dict[str, Any]


@dataclass(frozen=True)
class ContestSettings:
    """Compare runs of several models."""

    runs: list[str]
    """Run folders, as [runs/a-0, runs/b-0, runs/a-1, runs/b-1]; the first model is compared with
    each other one."""
    lengths: str | None = None
    """The .json that `train.analysis.length_extrapolation` wrote of the same models."""
    output: str = "results/contest.png"
    """Picture to write; the table goes beside it, ending in .md, and the numbers in .json."""
    title: str = "One model, several encodings of position"
    """Heading of the picture."""

    def __post_init__(self) -> None:
        check_figure_path(self.output)


def interval(values: Sequence[float]) -> Row:
    """Mean, half the width of its 95 % interval (None for a single value), and the values."""
    half = None
    if len(values) > 1:
        t = stats.t.ppf(0.975, len(values) - 1)
        half = float(t * np.std(values, ddof=1) / np.sqrt(len(values)))
    return {"mean": float(np.mean(values)), "half": half, "values": list(values)}


def rows_of(models: Models, lengths: list[Row]) -> list[Row]:
    """One row a model: what it costs, where it gets, and how far it stands from the first."""
    runs = [run for seeds in models.values() for run in seeds.values()]
    first = next(iter(models.values()))
    beyond = means(lengths)
    equal = {key: at_equal(key, runs)["validation_loss"] for key in ("tokens", "seconds")}
    rows = []
    for model, seeds in models.items():
        mine = list(seeds.values())
        at, shared = equal["tokens"], [x for x in seeds if x in first and seeds is not first]
        pairs = [(at[first[x].name], at[seeds[x].name]) for x in shared]
        ends = [a - b for a, b in pairs if a is not None and b is not None]
        here = {key: interval_of_all(losses, mine) for key, losses in equal.items()}
        speeds = [np.median([row["tokens_per_second"] for row in run.training]) for run in mine]
        rows.append(
            {
                "model": model,
                "parameters": mine[0].parameters,
                "tokens_per_second": interval([float(speed) for speed in speeds]),
                "at_equal_tokens": here["tokens"],
                "first_minus_it": interval(ends) if ends else None,
                "at_equal_time": here["seconds"],
                "at_length": {
                    length: interval(losses) if losses else "refused"
                    for length, losses in beyond.get((model, PLAIN), {}).items()
                },
            }
        )
    return rows


def interval_of_all(losses: dict[str, float | None], runs: list[Run]) -> Row | None:
    """The interval over runs, if all have a loss."""
    found = [loss for run in runs if (loss := losses[run.name]) is not None]
    return interval(found) if len(found) == len(runs) else None


def table(rows: list[Row], models: Models, unit: str) -> str:
    """Markdown: one line a model."""
    runs = [run for seeds in models.values() for run in seeds.values()]
    tokens = at_equal("tokens", runs)["tokens"] / 1e6
    minutes = at_equal("seconds", runs)["seconds"] / 60
    lengths = sorted({length for row in rows for length in row["at_length"]})
    heads = ["model", "seeds", "parameters", "tokens/s", f"loss at {tokens:.1f} M tokens"]
    heads += [f"{rows[0]['model']} − it", f"loss at {minutes:.1f} min"]  # noqa: RUF001 the sign
    heads += [f"at length {length}" for length in lengths]
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in rows:
        size = row["parameters"]
        cells = [row["model"], str(len(models[row["model"]])), f"{size:,}" if size else ""]
        cells += [cell(row["tokens_per_second"], ",.0f"), cell(row["at_equal_tokens"])]
        cells += [cell(row["first_minus_it"], "+.3f"), cell(row["at_equal_time"])]
        cells += [cell(row["at_length"].get(length)) for length in lengths]
        lines.append(f"| {' | '.join(cells)} |")
    note = f"Held-out loss in {unit}; mean ± half of the 95 % t interval over seeds of pretraining."
    return "\n".join([*lines, "", note])


def cell(found: Row | str | None, form: str = ".3f") -> str:
    """An interval in a table."""
    if found is None or isinstance(found, str):
        return found or ""
    half = "" if found["half"] is None else f" ± {found['half']:{form.replace('+', '')}}"
    return f"{found['mean']:{form}}{half}"


def draw(models: Models, lengths: list[Row], settings: ContestSettings, unit: str) -> None:
    """Loss against tokens, what separates each model from the first, loss against length."""
    axes = make_axes(1, 3 if lengths else 2, 15 if lengths else 10.5, 5.2)
    (first, leader), *others = models.items()
    for (name, seeds), colour in zip(models.items(), COLOURS * len(models)):
        draw_held_out(axes[0], "tokens", 1e6, name, list(seeds.values()), colour)
    for (_, seeds), colour in zip(others, (COLOURS * len(models))[1:]):
        found = difference(leader, seeds)
        if found is not None and found["tokens"]:
            places = np.array(found["tokens"]) / 1e6
            values = np.array(list(found["by_seed"].values()))
            axes[1].plot(places, values.mean(0), color=colour, linewidth=1.2)
            axes[1].fill_between(places, values.min(0), values.max(0), color=colour, alpha=0.2)
    axes[1].axhline(0, color="black", linewidth=0.8, linestyle=":")
    axes[0].set_ylabel(f"held-out loss ({unit})")
    axes[1].set_ylabel(f"{first} − the other; below 0 {first} is better")  # noqa: RUF001 the sign
    for axis in axes[:2]:
        axis.set_xlabel("tokens (millions); band: range over seeds")
    legend = {"loc": "outside lower center", "ncols": len(models), "frameon": False}
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), **legend)
    if lengths:
        # one is as long as the training's: nobody is rescaled there, or anywhere below it
        plain = [row for row in lengths if row["way"] == PLAIN]
        draw_on(axes[2], plain, min(row["length"] for row in plain), models)
        crosses = [x for x in zip(*axes[2].get_legend_handles_labels()) if REFUSED in x[1]]
        if crosses:  # the colours are those of the other panels
            axes[2].legend(*zip(*crosses), frameon=False, fontsize=8)
    axes[0].figure.suptitle(settings.title)
    save_figure(axes, Path(settings.output))


def read_lengths(file: str | None) -> list[Row]:
    """Rows that `lengths` wrote.

    Raises:
        InputError: There is no such file, or it holds something else.
    """
    if file is None:
        return []
    try:
        rows = json.loads(Path(file).read_text())
        means(rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = "lengths must be the .json that train.analysis.length_extrapolation wrote"
        raise InputError(f"{rule}, got {file} ({error!r}); run it first") from error
    return rows


def main(settings: ContestSettings) -> None:
    """Read, draw, write the numbers and the table, print it."""
    models, unit = read_runs(settings.runs)
    require(len(models) > 1, "runs", "must be of two models or more", len(models), "name another")
    lengths = read_lengths(settings.lengths)
    if lengths:
        require(
            unit == NATS, "lengths", "must be null for runs on bytes", settings.lengths, "drop it"
        )
    rows = rows_of(models, lengths)
    draw(models, lengths, settings, unit)
    output = Path(settings.output)
    text = table(rows, models, unit)
    output.with_suffix(".md").write_text(text + "\n")
    logs = {run.name: run.held_out for seeds in models.values() for run in seeds.values()}
    numbers = {"unit": unit, "models": rows, "held_out": logs}
    output.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(text)
    print(f"picture: {output}")


if __name__ == "__main__":
    run_command(main, ContestSettings)
