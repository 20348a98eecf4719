"""What one run gets wrong: confusion of classes, its most confident mistakes, AX by category.

    python -m finetune.report.error_analysis --results results.jsonl --model M --task rte
    python -m finetune.report.error_analysis --model M --task mnli --diagnostic diagnostic-full.tsv

Texts are read again from the data, and must be those the run was scored on: their labels are
compared with the ones kept beside its logits. AX has no labels of its own; GLUE publishes them,
with the category of each row, as diagnostic-full.tsv, whose rows are compared text by text.

Legend: N rows, C classes.
"""

import html
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.metrics import confusion_matrix

from finetune.data import read_split_columns
from finetune.metrics import accuracy, matthews
from finetune.results import RUN_KEY, prediction_file, read_predictions, read_results, run_name
from finetune.settings import normalize_paths
from finetune.tasks import TASKS, Task
from train.loop.launch import run_command
from train.settings import InputError, require

WORST = 20
LONGEST = 240
"""Characters of a text that are shown."""

CATEGORIES = ("Lexical Semantics", "Predicate-Argument Structure", "Logic", "Knowledge", "Domain")
DIAGNOSTIC = (*CATEGORIES, "Premise", "Hypothesis", "Label")
"""Columns of diagnostic-full.tsv, tab-separated; a row has any number of categories of each."""

AX = TASKS["ax"]
GET_LABELS = (
    "No scores: GLUE's AX data hold no labels (-1). It publishes labels and categories apart, as "
    "diagnostic-full.tsv (gluebenchmark.com/diagnostics): give that file as --diagnostic FILE."
)

Line = dict[str, Any]
Columns = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MistakesSettings:
    """Show what one run gets wrong."""

    results: str = "results.jsonl"
    """File that finetune/glue.py wrote, with its predictions beside it."""
    model: str
    """The run's model, as it was given."""
    task: str
    """The run's task; AX is part of mnli."""
    seed: int = 0
    """The run's seed."""
    run: str | None = None
    """Folder of the run in predictions/, where several fit; null leaves out random weights."""
    glue_dir: str | None = None
    """Folder of the data; null takes the run's."""
    diagnostic: str | None = None
    """GLUE's diagnostic-full.tsv, for AX by category."""
    output: str | None = None
    """Markdown file; null only prints."""

    def __post_init__(self) -> None:
        normalize_paths(self, "model", "glue_dir")
        known = [name for name, task in TASKS.items() if "train" in task.splits]
        remedy = "ax is part of mnli" if self.task == "ax" else "take one of them"
        rule = f"must be one of {', '.join(known)}"
        require(self.task in known, "task", rule, repr(self.task), remedy)
        only = self.diagnostic is None or self.task == "mnli"
        require(only, "diagnostic", "is for task mnli", self.task, "leave it out")
        folder = self.output is not None and Path(self.output).is_dir()
        require(not folder, "output", "must name a file", self.output, "add /mistakes.md")


def main(settings: MistakesSettings) -> str:
    """Print the analysis, and write it where asked.

    Returns:
        The Markdown.

    Raises:
        InputError: There is no such run, or its predictions, data or categories do not fit.
    """
    line = find_run(settings)
    task = TASKS[settings.task]
    again = [f"--{name} {shlex.quote(str(value))}" for name, value in _given(settings).items()]
    parts = [
        f"# Mistakes: {task.title}, {_plain(line['model'])}, seed {line['seed']}",
        f"Run: `{line['command']}`",
        f"This page: `python -m finetune.report.error_analysis {' '.join(again)}`",
    ]
    if line["collapsed"]:
        parts.append("**The run collapsed: it gives one answer for all rows of a split.**")
    glue_dir = settings.glue_dir or line["glue_dir"]
    for split in task.validation_splits:
        labels, logits = read_predictions(prediction_file(settings.results, line, split))
        columns = read_split_columns(task, split, glue_dir)
        require_same_rows(labels, columns["label"], f"{task.name}/{split}")
        title, *shown = section(task, split, labels, logits, columns)
        scores = line["metrics"][split].items()
        listed = ", ".join(f"{name} {100 * value:.1f}" for name, value in scores)
        parts += [title, f"{listed} (x 100, development set).", *shown]
    if task.name == "mnli":
        parts += ax_section(settings, line, glue_dir)
    text = "\n\n".join(parts) + "\n"
    print(text)
    try:
        if settings.output is not None:
            Path(settings.output).parent.mkdir(parents=True, exist_ok=True)
            Path(settings.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"output must be writable, got {error}; choose another") from error
    return text


def find_run(settings: MistakesSettings) -> Line:
    """The one scored line that the settings name.

    Raises:
        InputError: None fits, several do, or the one has no scores.
    """
    lines = read_results(settings.results)
    wanted = {"model": settings.model, "task": settings.task, "seed": settings.seed}
    fits = [line for line in lines if all(line[name] == v for name, v in wanted.items())]
    if settings.run is None:
        fits = [line for line in fits if not line["random_weights"]]
    else:
        fits = [line for line in fits if run_name(line) == settings.run]
    asked = ", ".join(f"{name} {value}" for name, value in wanted.items())
    if not fits:
        runs = ", ".join(sorted({f"{line['model']} {line['task']}" for line in lines})) or "none"
        raise InputError(f"results must hold a run of {asked}, got {runs}; check the names")
    if len(fits) > 1:
        differ = [name for name in RUN_KEY if len({str(line[name]) for line in fits}) > 1]
        found = "; ".join(
            f"{run_name(line)} ({', '.join(f'{name} {line[name]}' for name in differ)})"
            for line in fits
        )
        raise InputError(f"results must hold one run of {asked}, got {found}; give its --run")
    status = fits[0]["status"]
    require(status == "done", "run", "must have been scored", status, "make it again")
    return fits[0]


def section(
    task: Task, split: str, labels: NDArray, logits: NDArray[np.float32], columns: Columns
) -> list[str]:
    """One split: the table of errors and the worst of them.

    Args:
        task: Names of classes and columns.
        split: Its name.
        labels: [N].
        logits: [N, C], or values [N, 1].
        columns: The texts, each N strings.
    """
    texts = {name: columns[name] for name in task.columns}
    if task.labels is None:
        values = logits[:, 0].astype(np.float64)
        title = f"## {split}: {len(labels):,} rows"
        return [title, binned(labels, values), *largest_errors(labels, values, texts)]
    wrong = int((logits.argmax(axis=1) != labels).sum())
    title = f"## {split}: {wrong:,} of {len(labels):,} rows wrong"
    classes = range(len(task.labels))
    counts = confusion_matrix(labels.astype(np.int64), logits.argmax(axis=1), labels=classes)
    worst = confident_mistakes(labels, logits, texts, task.labels)
    return [title, confusion_table(counts, task.labels), *worst]


def confusion_table(counts: NDArray[np.int64], names: Sequence[str]) -> str:
    """Counts and, of each label's rows, shares."""
    header = ["label / prediction", *names, "rows"]
    rows = []
    for name, row in zip(names, counts):
        cells = [f"{n:,} ({_share(n, row.sum())})" for n in row]
        rows.append([name, *cells, f"{row.sum():,}"])
    return _table(header, rows)


def confident_mistakes(
    labels: NDArray, logits: NDArray[np.float32], texts: Columns, names: Sequence[str]
) -> list[str]:
    """The wrong answers with the highest probability, the surest first."""
    probabilities, answers = softmax(logits.astype(np.float64), axis=1), logits.argmax(axis=1)
    sure = np.where(answers != labels, probabilities.max(axis=1), -1.0)
    order = [row for row in np.argsort(-sure, kind="stable")[:WORST] if sure[row] >= 0]
    rows = [
        [
            str(row),
            names[int(labels[row])],
            names[answers[row]],
            f"{sure[row]:.4f}",
            *(_shortened(text[row]) for text in texts.values()),
        ]
        for row in order
    ]
    header = ["row", "label", "prediction", "probability", *texts]
    title = f"### The {len(rows)} most confident mistakes"
    return [title, _table(header, rows)] if rows else ["No row is wrong."]


def binned(labels: NDArray, values: NDArray[np.float64]) -> str:
    """Errors of values by their label: [0, 1), [1, 2), ..., [4, 5]."""
    header = ["label", "rows", "mean label", "mean prediction", "mean error", "mean absolute error"]
    bins = np.clip(np.floor(labels), 0, 4)
    rows = []
    for low in range(5):
        inside = bins == low
        name = f"{low} to {low + 1}" if low == 4 else f"{low} to below {low + 1}"
        if not inside.any():
            rows.append([name, "0", *["-"] * 4])
            continue
        errors = (values - labels)[inside]
        means = (labels[inside].mean(), values[inside].mean(), errors.mean(), abs(errors).mean())
        rows.append([name, f"{inside.sum():,}", *(f"{mean:.2f}" for mean in means)])
    return _table(header, rows)


def largest_errors(labels: NDArray, values: NDArray[np.float64], texts: Columns) -> list[str]:
    """The values furthest from their labels, the furthest first."""
    errors = values - labels
    rows = [
        [
            str(row),
            f"{labels[row]:.2f}",
            f"{values[row]:.2f}",
            f"{errors[row]:+.2f}",
            *(_shortened(text[row]) for text in texts.values()),
        ]
        for row in np.argsort(-abs(errors), kind="stable")[:WORST]
    ]
    header = ["row", "label", "prediction", "error", *texts]
    return [f"### The {len(rows)} largest errors", _table(header, rows)]


def ax_section(settings: MistakesSettings, line: Line, glue_dir: str | None) -> list[str]:
    """AX as far as its labels are known: by category, or how often each class is predicted."""
    file = prediction_file(settings.results, line, "ax")
    if not file.exists():
        asked, remedy = settings.diagnostic is not None, "make the run again with --test true"
        require(not asked, "diagnostic", "needs the run's predictions of ax", "none", remedy)
        return []
    _, logits = read_predictions(file)
    answers = logits.argmax(axis=1)
    title = f"## {AX.title}: {len(answers):,} rows"
    assert AX.labels is not None
    if settings.diagnostic is None:
        counts = np.bincount(answers, minlength=len(AX.labels))
        rows = [[n, f"{c:,}", _share(c, len(answers))] for n, c in zip(AX.labels, counts)]
        return [title, _table(["prediction", "rows", "share"], rows), GET_LABELS]
    table = read_diagnostic(settings.diagnostic)
    found = f"{len(table['Label']):,}"
    rule = f"must have the {len(answers):,} rows that were predicted"
    whole = len(table["Label"]) == len(answers)
    require(whole, settings.diagnostic, rule, found, "take GLUE's whole file")
    checked = require_same_texts(table, settings.diagnostic, glue_dir)
    labels = np.array([AX.labels.index(name) for name in table["Label"]])
    columns = dict(zip(AX.columns, (table["Premise"], table["Hypothesis"])))
    note = (
        f"Matthews correlation over the three classes x 100, 0.0 where labels or predictions are "
        f"one class. A row with several categories counts in each. {checked}"
    )
    return [
        title,
        category_table(labels, answers, table),
        note,
        *section(AX, "AX", labels, logits, columns)[1:],
    ]


def category_table(labels: NDArray, answers: NDArray, table: dict[str, list[str]]) -> str:
    """Scores of all rows, of each coarse category, and of the fine ones in it."""
    groups = [("all", np.ones(len(labels), bool))]
    for coarse in CATEGORIES:
        cells = [[part.strip() for part in cell.split(";")] for cell in table[coarse]]
        groups.append((f"**{coarse}**", np.array([any(parts) for parts in cells])))
        groups += [
            (_plain(fine), np.array([fine in parts for parts in cells]))
            for fine in sorted({part for parts in cells for part in parts if part})
        ]
    rows = [
        [
            name,
            f"{rows.sum():,}",
            f"{100 * matthews(labels[rows], answers[rows]):.1f}",
            f"{100 * accuracy(labels[rows], answers[rows]):.1f}",
        ]
        for name, rows in groups
        if rows.any()
    ]
    return _table(["category", "rows", "Matthews", "accuracy"], rows)


def read_diagnostic(file: str) -> dict[str, list[str]]:
    """The columns of diagnostic-full.tsv.

    Raises:
        InputError: It cannot be read or is not that file; the message names the line.
    """
    try:
        content = Path(file).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"diagnostic must be GLUE's diagnostic-full.tsv, got {error}; check the path"
        ) from error
    rows = [line.rstrip("\r").split("\t") for line in content.removesuffix("\n").split("\n")]
    header, names = tuple(rows[0]), AX.labels or ()
    rule = f"must begin with the columns {', '.join(DIAGNOSTIC)}"
    require(header == DIAGNOSTIC, file, rule, ", ".join(header), "take GLUE's diagnostic-full.tsv")
    for number, row in enumerate(rows[1:], 2):
        where, width = f"{file} line {number}", len(header)
        require(len(row) == width, where, f"must have {width} cells", len(row), "mend it")
        rule = f"must end in one of {', '.join(names)}"
        require(row[-1] in names, where, rule, repr(row[-1]), "mend it")
    return {name: [row[place] for row in rows[1:]] for place, name in enumerate(header)}


def require_same_texts(table: dict[str, list[str]], file: str, glue_dir: str | None) -> str:
    """Refuse categories of other rows than those that were predicted.

    Returns:
        A sentence that says whether there were texts to compare.

    Raises:
        InputError: A text differs; the message names the line.
    """
    try:
        columns = read_split_columns(AX, "test", glue_dir)
    except InputError:
        return f"The order of rows was not checked: {glue_dir or 'the hub'} gave no {AX.name}."
    count, found = len(columns["label"]), f"{len(table['Label']):,}"
    rule = f"must have the {count:,} rows of {AX.name}"
    require(len(table["Label"]) == count, file, rule, found, "take GLUE's whole file")
    for name, there in zip(("Premise", "Hypothesis"), AX.columns):
        for number, (text, wanted) in enumerate(zip(table[name], columns[there]), 2):
            rule = f"must have the {there} {wanted[:60]!r}"
            same = wanted.split() in (text.split(), _unquoted(text).split())
            require(same, f"{file} line {number}", rule, repr(text[:60]), "use GLUE's order")
    return "The texts are those that were predicted, row by row."


def require_same_rows(labels: NDArray, read: NDArray, where: str) -> None:
    """Refuse data that are not those a run was scored on.

    Raises:
        InputError: Their number or a label differs.
    """
    rule, remedy = "must be the data the run was scored on", "name their folder"
    found = f"{len(read):,} rows for {len(labels):,} predictions"
    require(len(labels) == len(read), f"glue_dir's {where}", rule, found, remedy)
    same = np.asarray(labels) == np.asarray(read)
    found = f"another label in row {int(same.argmin())}"
    require(bool(same.all()), f"glue_dir's {where}", rule, found, remedy)


def _given(settings: MistakesSettings) -> dict[str, Any]:
    return {name: value for name, value in vars(settings).items() if value is not None}


def _unquoted(text: str) -> str:
    """What a cell says if a spreadsheet has put it in quotes."""
    quoted = len(text) > 1 and text[0] == text[-1] == '"'
    return text[1:-1].replace('""', '"') if quoted else text


def _shortened(text: str) -> str:
    return _plain(text if len(text) <= LONGEST else text[: LONGEST - 2].rstrip() + " …")


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in a table too."""
    return re.sub(r"([\\`*_{}\[\]|~#])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    run_command(main, MistakesSettings)
