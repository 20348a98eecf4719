"""Errors of one run: confusion of classes and its most confident mistakes.

    python -m finetune.report.error_analysis --results runs/results.jsonl --model M --task rte

Texts are read again from the data, whose labels are compared with those stored beside the logits.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.metrics import confusion_matrix

from finetune.data import read_split_columns
from finetune.report.runs import shorten_names
from finetune.results import Result, prediction_file, read_predictions, read_results, run_name
from finetune.settings import normalize_paths
from finetune.tasks import Task, recorded_task
from train.command_line import run_command
from train.settings import InputError
from train.tables import escape_cell, markdown_table

NUM_MISTAKES = 20
MAX_CHARACTERS = 240
"""Characters of a text that are shown."""
MAX_CLASSES = 20
"""Classes of which the whole table of confusions is shown."""


@dataclass(frozen=True, kw_only=True)
class ErrorAnalysisSettings:
    """Show what one run gets wrong."""

    results: str = "runs/results.jsonl"
    """File that finetune/glue.py wrote, with its predictions beside it."""
    model: str
    """The run's model, as it was given, or its short name in the report."""
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
        f"# Mistakes: {task.title}, {escape_cell(result['model'])}, seed {result['seed']}",
        f"Run: `{result['command']}`",
    ]
    if result["collapsed"]:
        parts.append("**The run collapsed: it gives one answer for all rows.**")
    glue_dir = settings.glue_dir or result["glue_dir"]
    for split in task.validation_splits:
        labels, logits = read_predictions(prediction_file(settings.results, result, split))
        columns = read_split_columns(task, split, glue_dir)
        if not np.array_equal(labels, columns["label"]):
            raise InputError(
                f"glue_dir's {task.name}/{split} must be the data the run was scored on, "
                "got other rows or labels; name their folder"
            )
        title, *tables = analyse_split(task, labels, logits, columns)
        metrics = [f"{name} {100 * x:.1f}" for name, x in result["metrics"][split].items()]
        scores = f"{', '.join(metrics)} (x 100, validation split)."
        parts += [f"## {split}: {title}", scores, *tables]
    parts.append("Rows are numbered from 0 within the split, also one held out of another file.")
    text = "\n\n".join(parts) + "\n"
    print(text)
    return text


def find_run(settings: ErrorAnalysisSettings) -> Result:
    """Find the one scored result that the settings name.

    Raises:
        InputError: There is none, or there are several.
    """
    results = read_results(settings.results)
    names = shorten_names(x["model"] for x in results)
    of_task = [x for x in results if settings.task in (x["task"], recorded_task(x).name)]
    found = [x for x in of_task if (x["seed"], x["status"]) == (settings.seed, "done")]
    found = [x for x in found if settings.model in (x["model"], names[x["model"]])]
    if settings.run is None:
        found = [x for x in found if not x["random_weights"]]
    else:
        found = [x for x in found if run_name(x) == settings.run]
    if len(found) != 1:
        runs = ", ".join(map(run_name, found)) or "none"
        seeds = sorted({x["seed"] for x in of_task})
        remedy = f"it has the models {', '.join(sorted(names.values()))} and seeds {seeds}"
        if not of_task:
            remedy = f"it has the tasks {', '.join(sorted({x['task'] for x in results}))}"
        if found:
            remedy = "give its --run, whose end is run_id in report.csv"
        raise InputError(
            f"results must hold one scored run of model {settings.model}, task {settings.task}, "
            f"seed {settings.seed}, got {runs}; {remedy}"
        )
    return found[0]


def analyse_split(
    task: Task, labels: NDArray, logits: NDArray[np.float32], columns: dict[str, Any]
) -> list[str]:
    """Describe the errors on one split: a heading, the confusion of classes, the worst rows.

    Labels are class ids or values, [N]; logits are [N, classes] or predicted values, [N, 1].
    """
    texts = pd.DataFrame({name: columns[name] for name in task.columns}).map(shorten)
    if task.is_regression:
        frame = pd.DataFrame({"label": labels, "prediction": logits[:, 0].astype(np.float64)})
        frame["error"] = frame["prediction"] - frame["label"]
        order = frame["error"].abs()
        shown = frame.map("{:.2f}".format).assign(error=frame["error"].map("{:+.2f}".format))
        parts, kind = [f"{len(labels):,} rows"], "largest errors"
    else:
        names = np.array([escape_cell(name) for name in task.labels or ()])
        answers, ids = logits.argmax(axis=1), labels.astype(np.int64)
        probability = pd.Series(softmax(logits.astype(np.float64), axis=1).max(axis=1))
        order = probability[answers != ids]
        shown = pd.DataFrame({"label": names[ids], "prediction": names[answers]})
        shown["probability"] = probability.map("{:.4f}".format)
        title = f"{len(order):,} of {len(labels):,} rows wrong"
        parts = [title, confusion_table(ids, answers, names)]
        kind = "most confident mistakes"
    worst = order.sort_values(ascending=False, kind="stable")[:NUM_MISTAKES]
    if worst.empty:
        return [*parts, "No row is wrong."]
    table = shown.join(texts).loc[worst.index].reset_index(names="row").astype({"row": str})
    return [*parts, f"### The {len(worst)} {kind}", markdown_table(table)]


def confusion_table(ids: NDArray, answers: NDArray, names: NDArray) -> str:
    """Counts of labels and predictions [N], and their share of each label's rows.

    Of many classes only the most frequent mistakes.
    """
    if len(names) > MAX_CLASSES:
        pairs = pd.DataFrame({"label": names[ids], "prediction": names[answers]})[ids != answers]
        frequent = pairs.value_counts()[:MAX_CLASSES].reset_index(name="rows")
        return markdown_table(frequent.astype(str))
    counts = confusion_matrix(ids, answers, labels=range(len(names)))
    rows = [[f"{n:,} ({100 * n / max(1, row.sum()):.1f} %)" for n in row] for row in counts]
    frame = pd.DataFrame(rows, columns=names)
    frame.insert(0, "label / prediction", names)
    return markdown_table(frame.assign(rows=[f"{n:,}" for n in counts.sum(axis=1)]))


def shorten(text: str) -> str:
    """The beginning of a text, escaped."""
    short = text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 2].rstrip() + " …"
    return escape_cell(short)


if __name__ == "__main__":
    run_command(main, ErrorAnalysisSettings)
