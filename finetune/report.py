"""results.jsonl to tables and a figure: `python -m finetune.report results.jsonl`.

A row is one model with one recipe; runs that differ in the seed alone share a cell. Pretrained
models, their controls from random weights and the majority baseline are rows of their own. GLUE,
GLUE tasks with rows missing and the demo tasks are never in one table.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from finetune.results import read_results
from finetune.tasks import TASKS
from train.launch import run_command
from train.settings import require

Line = dict[str, Any]
Scores = dict[int, tuple[float, ...]]  # seed -> headline x 100 of each validation split

TITLES = {
    "official": "GLUE, development set",
    "reduced": "GLUE tasks with rows missing (not the official splits, not a GLUE score)",
    "demo": "demo tasks (not GLUE)",
}
METRIC_NAMES = {"f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}
NOTE = (
    "Headline metric x 100 on the validation split after the last epoch, by which nothing was "
    "selected: mean ± sample standard deviation over seeds (number of seeds). MNLI is "
    "matched/mismatched. Average: mean of the headline metrics over the tasks shown, MNLI counting "
    "once, only where every task is present. The majority baseline always says the commonest "
    "training class, or for a regression its mean, which correlates 0. A difference is taken seed "
    "by seed."
)


@dataclass(frozen=True)
class ReportSettings:
    """Tables and a figure from a results file."""

    results: str
    """File that finetune/glue.py or finetune/grid.py wrote."""
    output: str | None = None
    """Folder for report.md, report.json and report.png; null means the results' own."""


@dataclass(frozen=True)
class Row:
    """One line of a table: a name and the scores of each task, by the task's label."""

    name: str
    kind: str
    cells: dict[str, Scores]

    def means(self, label: str) -> np.ndarray:
        """The mean over seeds, one number for each validation split."""
        return np.array(list(self.cells[label].values())).mean(axis=0)

    def deviations(self, label: str) -> np.ndarray | None:
        """The sample standard deviation over seeds; None for a single seed."""
        values = np.array(list(self.cells[label].values()))
        return values.std(axis=0, ddof=1) if len(values) > 1 else None

    def average(self, labels: Sequence[str]) -> float | None:
        """The mean over tasks; None when one is missing."""
        if any(label not in self.cells for label in labels):
            return None
        return float(np.mean([self.means(label).mean() for label in labels]))


@dataclass(frozen=True)
class Table:
    """The rows of one group of tasks, and the labels of its columns."""

    group: str
    labels: dict[str, str]
    rows: list[Row]


def main(settings: ReportSettings) -> str:
    """Print the tables and write report.md, report.json and report.png.

    Returns:
        The Markdown.

    Raises:
        InputError: There are no results.
    """
    lines = read_results(settings.results)
    require(
        bool(lines), "results", "must hold a complete line", settings.results, "make a run first"
    )
    tables = [table for group in TITLES if (table := build_table(lines, group)).rows]
    folder = Path(settings.output) if settings.output else Path(settings.results).parent
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(markdown(table) for table in tables) + f"\n{NOTE}\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    report = {"note": NOTE, "tables": [as_json(table) for table in tables]}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(tables, folder / "report.png")
    print(text)
    return text


def group_of(line: Line) -> str:
    """Which table a line belongs to; only lines that are official get into GLUE's."""
    if not TASKS[line["task"]].official:
        return "demo"
    return "official" if line["official"] else "reduced"


def build_table(lines: Sequence[Line], group: str) -> Table:
    """The rows of one group: models, then their controls, the difference and the baseline."""
    chosen = [line for line in lines if group_of(line) == group]
    order = list(TASKS)
    chosen.sort(key=lambda line: order.index(line["task"]))
    labels = {line["label"]: column_title(line) for line in chosen}
    rows = model_rows(chosen)
    rows += [row for row in (difference(chosen),) if row is not None]
    if chosen:
        rows.append(baseline(chosen))
    return Table(group, labels, rows)


def column_title(line: Line) -> str:
    """The task and its metric; a task with rows missing keeps its own label."""
    task, metric = TASKS[line["task"]], line["headline_metric"]
    name = task.title if line["official"] or not task.official else line["label"]
    return f"{name}, {METRIC_NAMES.get(metric, metric)}"


def recipe_of(line: Line) -> tuple:
    """What a row holds fixed beside the model."""
    return tuple(line[name] for name in ("learning_rate", "epochs", "batch_size", "length"))


def scores_of(line: Line, field: str = "metrics") -> tuple[float, ...]:
    """The headline metric x 100 of each validation split."""
    return tuple(100 * values[line["headline_metric"]] for values in line[field].values())


def model_rows(lines: Sequence[Line]) -> list[Row]:
    """A row for each (model, random weights or not, recipe); pretrained models come first.

    Of a run that was made twice the later line counts.
    """
    several = len({recipe_of(line) for line in lines}) > 1
    names = short_names({line["model"] for line in lines})
    rows: dict[tuple, Row] = {}
    for line in lines:
        key = (line["random_weights"], line["model"], recipe_of(line))
        name = f"{names[line['model']]} ({line['model_type']})"
        name += ", random weights" * line["random_weights"]
        name += f", {describe_recipe(recipe_of(line))}" * several
        row = rows.setdefault(key, Row(name, "random" if line["random_weights"] else "model", {}))
        row.cells.setdefault(line["label"], {})[line["seed"]] = scores_of(line)
    return [rows[key] for key in sorted(rows)]


def describe_recipe(recipe: tuple) -> str:
    """A recipe in words, for tables that hold several."""
    rate, epochs, batch_size, length = recipe
    return f"rate {rate:g}, {epochs} epochs, batch {batch_size}, length {length}"


def short_names(models: Iterable[str]) -> dict[str, str]:
    """The telling part of each path: runs/NAME/model is NAME; the whole where two are equal."""
    short = {}
    for model in models:
        parts = [part for part in Path(model).parts if part != "model"]
        short[model] = parts[-1] if parts else model
    taken = list(short.values())
    return {model: name if taken.count(name) == 1 else model for model, name in short.items()}


def difference(lines: Sequence[Line]) -> Row | None:
    """RoFormer - BERT seed by seed, where there is exactly one pretrained row of each."""
    sides: dict[str, Row] = {}
    for kind in ("roformer", "bert"):
        rows = model_rows([x for x in lines if x["model_type"] == kind and not x["random_weights"]])
        if len(rows) != 1:
            return None
        sides[kind] = rows[0]
    ours, theirs = sides["roformer"].cells, sides["bert"].cells
    cells: dict[str, Scores] = {}
    for label in (label for label in ours if label in theirs):
        seeds = [seed for seed in ours[label] if seed in theirs[label]]
        cells[label] = {
            seed: tuple(a - b for a, b in zip(ours[label][seed], theirs[label][seed]))
            for seed in seeds
        }
    return Row("RoFormer − BERT", "difference", {k: v for k, v in cells.items() if v})  # noqa: RUF001


def baseline(lines: Sequence[Line]) -> Row:
    """The majority baseline, which every line carries for its own data."""
    cells = {line["label"]: {0: scores_of(line, "majority_metrics")} for line in lines}
    return Row("majority baseline", "majority", cells)


def cell_text(row: Row, label: str) -> str:
    """A cell of the Markdown table."""
    if label not in row.cells:
        return "–"  # noqa: RUF001 a dash, as tables have it
    sign = "+" if row.kind == "difference" else ""
    texts = [f"{mean:{sign}.1f}" for mean in row.means(label)]
    spread = row.deviations(label)
    if spread is not None:
        texts = [f"{text} ± {deviation:.1f}" for text, deviation in zip(texts, spread)]
    count = "" if row.kind == "majority" else f" ({len(row.cells[label])})"
    return "/".join(texts) + count


def markdown(table: Table) -> str:
    """A heading and a table."""
    heads = ["model", *table.labels.values(), "average"]
    lines = [f"### {TITLES[table.group]}", "", "| " + " | ".join(heads) + " |"]
    lines.append("|---|" + "---:|" * (len(heads) - 1))
    for row in table.rows:
        average = row.average(list(table.labels))
        sign = "+" if row.kind == "difference" else ""
        last = "–" if average is None else f"{average:{sign}.1f}"  # noqa: RUF001
        cells = [row.name, *(cell_text(row, label) for label in table.labels), last]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def as_json(table: Table) -> dict[str, Any]:
    """A table with every score of every seed."""
    rows = []
    for row in table.rows:
        cells = {}
        for label, scores in row.cells.items():
            spread = row.deviations(label)
            cells[label] = {
                "mean": row.means(label).tolist(),
                "std": None if spread is None else spread.tolist(),
                "seeds": {str(seed): list(values) for seed, values in scores.items()},
            }
        average = row.average(list(table.labels))
        rows.append({"name": row.name, "kind": row.kind, "cells": cells, "average": average})
    return {"title": TITLES[table.group], "tasks": table.labels, "rows": rows}


def draw(tables: Sequence[Table], file: Path) -> None:
    """A panel for each table: a dot for each seed, the mean and its spread for each model."""
    mpl.use("Agg")
    height = 0.9 + sum(3.4 + 0.22 * len(table.rows) for table in tables)
    widest = max(len(table.labels) for table in tables)
    figure, panels = plt.subplots(
        len(tables), figsize=(max(7.0, 2.0 + 1.7 * widest), height), squeeze=False
    )
    for table, axes in zip(tables, panels[:, 0]):
        draw_table(table, axes)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def draw_table(table: Table, axes: Axes) -> None:
    """One panel; the columns are those of the table, MNLI's two splits under one name."""
    rows = [row for row in table.rows if row.kind in ("model", "random")]
    places = {label: place for place, label in enumerate(table.labels)}
    for number, row in enumerate(rows):
        shift = 0.7 * ((number + 0.5) / len(rows) - 0.5)
        style: dict[str, Any] = {
            "color": f"C{number}",
            "marker": "o" if row.kind == "model" else "x",
        }
        dots = [(places[k] + shift, v) for k, s in row.cells.items() for t in s.values() for v in t]
        across, scores = zip(*dots)
        axes.scatter(across, scores, s=14, alpha=0.45, **style)
        axes.errorbar(
            [places[label] + shift for label in row.cells],
            [row.means(label).mean() for label in row.cells],
            yerr=[_spread(row, label) for label in row.cells],
            label=row.name,
            linestyle="none",
            markersize=8,
            capsize=4,
            **style,
        )
    floor = table.rows[-1]
    for number, label in enumerate(floor.cells):
        middle, level = places[label], floor.means(label).mean()
        name = floor.name if number == 0 else ""  # one entry in the legend
        axes.hlines(level, middle - 0.4, middle + 0.4, "0.5", "dashed", label=name)
    axes.set_xticks(
        list(places.values()), [text.replace(", ", "\n") for text in table.labels.values()]
    )
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_ylabel("headline metric × 100")  # noqa: RUF001
    axes.set_xlabel("task, metric")
    axes.set_title(TITLES[table.group])
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), fontsize=8, frameon=False)


def _spread(row: Row, label: str) -> float:
    """Half the length of the error bar: over seeds, of the mean over validation splits."""
    values = np.array(list(row.cells[label].values())).mean(axis=1)
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


if __name__ == "__main__":
    flags = sys.argv[1:]
    named = not flags or flags[0].startswith("-")
    run_command(main, ReportSettings, flags if named else ["--results", *flags])
