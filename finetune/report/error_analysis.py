"""Errors of one run: confusion of classes and its most confident mistakes.

    python -m finetune.report.error_analysis --results results.jsonl --model M --task rte

Texts are read again from the data, whose labels are compared with those stored beside the logits.
"""

import html
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.metrics import confusion_matrix

from finetune.results import RUN_KEY, prediction_file, read_predictions, read_results, run_name
from finetune.settings import normalize_paths
from finetune.task_data import read_split_columns
from finetune.tasks import Task, recorded_task
from train.command_line import run_command
from train.settings import InputError, require
from train.tables import markdown_table

NUM_MISTAKES = 20
MAX_CHARACTERS = 240
"""Characters of a text that are shown."""


@dataclass(frozen=True, kw_only=True)
class ErrorAnalysisSettings:
    """Show what one run gets wrong."""

    results: str = "results.jsonl"
    """File that finetune/glue.py wrote, with its predictions beside it."""
    model: str
    """The run's model, as it was given."""
    task: str
    """The run's task."""
    seed: int = 0
    """The run's seed."""
    run: str | None = None
    """Folder of the run in predictions/, if several runs match; null leaves out random weights."""
    glue_dir: str | None = None
    """Folder of the data; null takes the run's."""

    def __post_init__(self) -> None:
        normalize_paths(self, "model", "glue_dir", "task")


def main(settings: ErrorAnalysisSettings) -> str:
    """Print the analysis as Markdown.

    Raises:
        InputError: There is no such run, or its predictions or data do not match.
    """
    result = find_run(settings)
    task = recorded_task(result)
    parts = [
        f"# Mistakes: {task.title}, {escape_text(result['model'])}, seed {result['seed']}",
        f"Run: `{result['command']}`",
    ]
    if result["collapsed"]:
        parts.append("**The run collapsed: it gives one answer for all rows of a split.**")
    glue_dir = settings.glue_dir or result["glue_dir"]
    for split in task.validation_splits:
        labels, logits = read_predictions(prediction_file(settings.results, result, split))
        columns = read_split_columns(task, split, glue_dir)
        check_same_labels(labels, columns["label"], f"{task.name}/{split}")
        title, *tables = analyse_split(task, labels, logits, columns)
        metrics = [f"{name} {100 * x:.1f}" for name, x in result["metrics"][split].items()]
        scores = f"{', '.join(metrics)} (x 100, development set)."
        parts += [f"## {split}: {title}", scores, *tables]
    text = "\n\n".join(parts) + "\n"
    print(text)
    return text


def find_run(settings: ErrorAnalysisSettings) -> dict[str, Any]:
    """Find the one scored line that the settings name.

    Raises:
        InputError: There is none, there are several, or it has no scores.
    """
    results = read_results(settings.results)
    wanted = {"model": settings.model, "task": settings.task, "seed": settings.seed}
    found = [x for x in results if all(x[name] == value for name, value in wanted.items())]
    if settings.run is None:
        found = [x for x in found if not x["random_weights"]]
    else:
        found = [x for x in found if run_name(x) == settings.run]
    asked = ", ".join(f"{name} {value}" for name, value in wanted.items())
    runs = ", ".join(sorted({f"{x['model']} {x['task']}" for x in results})) or "none"
    require(bool(found), "results", f"must hold a run of {asked}", runs, "check the names")
    if len(found) > 1:
        differing = [name for name in RUN_KEY if len({str(x[name]) for x in found}) > 1]
        runs = "; ".join(
            f"{run_name(x)} ({', '.join(f'{name} {x[name]}' for name in differing)})" for x in found
        )
        raise InputError(f"results must hold one run of {asked}, got {runs}; give its --run")
    status = found[0]["status"]
    require(status == "done", "run", "must have been scored", status, "make it again")
    return found[0]


def analyse_split(
    task: Task, labels: NDArray, logits: NDArray[np.float32], columns: dict[str, Any]
) -> list[str]:
    """Describe the errors on one split: a heading, the table of all, and the worst of them.

    Args:
        task: Names of classes and columns.
        labels: Class ids or values, [N].
        logits: [N, classes], or predicted values, [N, 1].
        columns: The texts, each N strings.
    """
    texts = pd.DataFrame({name: columns[name] for name in task.columns}).map(shorten)
    if task.labels is None:
        frame = pd.DataFrame({"label": labels, "prediction": logits[:, 0].astype(np.float64)})
        frame["error"] = frame["prediction"] - frame["label"]
        worst = frame["error"].abs().sort_values(ascending=False, kind="stable")[:NUM_MISTAKES]
        shown = frame.map("{:.2f}".format).assign(error=frame["error"].map("{:+.2f}".format))
        heading = f"### The {len(worst)} largest errors"
        table = _with_row_numbers(shown.join(texts).loc[worst.index])
        lowest, highest = task.value_range or (float(labels.min()), float(labels.max()))
        by_label = errors_by_label(frame, lowest, highest)
        return [f"{len(labels):,} rows", by_label, heading, table]
    names, answers = np.array(task.labels), logits.argmax(axis=1)
    probability = pd.Series(softmax(logits.astype(np.float64), axis=1).max(axis=1))
    ids = labels.astype(np.int64)
    wrong = probability[answers != ids].sort_values(ascending=False, kind="stable")
    frame = pd.DataFrame({"label": names[ids], "prediction": names[answers]})
    frame["probability"] = probability.map("{:.4f}".format)
    counts = confusion_matrix(ids, answers, labels=range(len(names)))
    parts = [f"{len(wrong):,} of {len(labels):,} rows wrong", confusion_table(counts, names)]
    if wrong.empty:
        return [*parts, "No row is wrong."]
    heading = f"### The {min(len(wrong), NUM_MISTAKES)} most confident mistakes"
    return [*parts, heading, _with_row_numbers(frame.join(texts).loc[wrong.index[:NUM_MISTAKES]])]


def confusion_table(counts: NDArray[np.int64], names: NDArray) -> str:
    """Counts [label, prediction] and their share of each label's rows."""
    rows = [[f"{n:,} ({_share(n, row.sum())})" for n in row] for row in counts]
    frame = pd.DataFrame(rows, columns=names)
    frame.insert(0, "label / prediction", names)
    return markdown_table(frame.assign(rows=[f"{n:,}" for n in counts.sum(axis=1)]))


def errors_by_label(frame: pd.DataFrame, lowest: float, highest: float) -> str:
    """Mean errors of a regression in five intervals of labels, [0, 1), ..., [4, 5] from 0 to 5."""
    edges = np.linspace(lowest, highest, 6)
    frame = frame.assign(absolute=frame["error"].abs())
    index = np.searchsorted(edges, frame["label"], side="right") - 1
    bins = frame.groupby(np.clip(index, 0, 4))
    means = bins.mean().reindex(range(5)).map(lambda mean: "-" if np.isnan(mean) else f"{mean:.2f}")
    means.columns = [f"mean {x}" for x in ("label", "prediction", "error", "absolute error")]
    ranges = [f"{low:.4g} to below {high:.4g}" for low, high in pairwise(edges[:5])]
    means.insert(0, "label", [*ranges, f"{edges[4]:.4g} to {highest:.4g}"])
    means.insert(1, "rows", [f"{n:,}" for n in bins.size().reindex(range(5), fill_value=0)])
    return markdown_table(means)


def check_same_labels(labels: NDArray, read: NDArray, split: str) -> None:
    """Refuse data other than those the run was scored on.

    Raises:
        InputError: The number of rows or a label differs.
    """
    found = ""
    if len(labels) != len(read):
        found = f"{len(read):,} rows for {len(labels):,} predictions"
    elif (labels != read).any():
        found = f"another label in row {int((labels != read).argmax())}"
    rule = "must be the data the run was scored on"
    require(not found, f"glue_dir's {split}", rule, found, "name their folder")


def escape_text(text: str) -> str:
    """Text that Markdown shows as it is, also in a table."""
    return re.sub(r"([\\`*_{}\[\]|~#])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def shorten(text: str) -> str:
    """The beginning of a text, escaped."""
    short = text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 2].rstrip() + " …"
    return escape_text(short)


def _with_row_numbers(frame: pd.DataFrame) -> str:
    return markdown_table(frame.reset_index(names="row").astype({"row": str}))


def _share(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else "-"


if __name__ == "__main__":
    run_command(main, ErrorAnalysisSettings)
