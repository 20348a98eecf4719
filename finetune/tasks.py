"""Tasks: data, columns, labels and metrics, as rows of a table or as a YAML file of your own.

Source of the table: Wang et al. 2019, "GLUE" (arXiv:1804.07461); column names and label ids are
those of `nyu-mll/glue`, headline metrics those of the RoFormer paper (F1 for MRPC and QQP, Spearman
for STS-B, accuracy otherwise) and Matthews for CoLA. The demo task has GLUE's schema but is not
GLUE. Results on a split without its official number of rows are not official either.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.command_line import parse_settings
from train.settings import InputError, check_seed

HUB_DATA = "nyu-mll/glue"
"""Hub id of GLUE."""
CLASS_METRICS = ("accuracy", "macro_f1", "f1", "matthews")
VALUE_METRICS = ("spearman", "pearson")
METRIC_NAMES = {
    "accuracy": ("accuracy", "accuracy"),
    "macro_f1": ("f1", "macro F1"),
    "f1": ("f1", "F1"),
    "matthews": ("matthews_correlation", "Matthews correlation"),
    "spearman": ("spearmanr", "Spearman correlation"),
    "pearson": ("pearsonr", "Pearson correlation"),
}
"""Metric -> its name on the hub and in print."""
PREDICTION_COLUMNS = {"prediction", "probability"}
"""What is added to the rows of a test file."""
RESERVED_COLUMNS = {"error", "label", "row", *PREDICTION_COLUMNS}
"""Names that no text column of your own may have."""


@dataclass(frozen=True, kw_only=True)
class TaskDescription:
    """A task as a YAML file describes it."""

    name: str = ""
    """Name in results and tables; empty means the name of the YAML file."""
    title: str = ""
    """Heading in tables; empty means the name."""
    columns: tuple[str, ...]
    """One or two text columns, in the order of the model's input."""
    label_column: str = "label"
    """Column of the labels: names or ids of classes, or numbers for a regression."""
    labels: tuple[str, ...] | None = None
    """Names of the classes in the order of their ids; null for a regression."""
    value_range: tuple[float, float] | None = None
    """Lowest and highest label of a regression; null allows all numbers."""
    metrics: tuple[str, ...] = ()
    """Scores to report: of accuracy, macro_f1, f1 (of the second of two classes), matthews; for a
    regression of spearman and pearson. Empty means accuracy and macro_f1, or both."""
    headline: str = ""
    """The metric that tables show; empty means the first one."""
    train: str | None = None
    """Training rows: a .csv, .tsv, .jsonl or .parquet file, or with `hub` the name of a split."""
    validation: str | None = None
    """Rows to score, as `train`; null holds out a share of the training rows."""
    test: str | None = None
    """Rows to predict and, if all have labels, to score with `--test true`; as `train`."""
    hub: str | None = None
    """Hub id of the data set whose splits are named above; null means files."""
    hub_config: str | None = None
    """Configuration of the data set, if it has several."""
    validation_share: float = 0.1
    """Share of the distinct training texts that is held out where `validation` is null."""
    split_seed: int = 0
    """Seed of the choice of the rows held out."""


@dataclass(frozen=True, kw_only=True)
class Task(TaskDescription):
    """A task, of `TASKS` or of a YAML file: its description checked, with defaults filled in."""

    def __post_init__(self) -> None:
        known = VALUE_METRICS if self.is_regression else CLASS_METRICS
        metrics = tuple(self.metrics or known[:2])
        values = {
            "title": self.title or self.name,
            "columns": tuple(self.columns),  # a result has lists
            "labels": None if self.labels is None else tuple(self.labels),
            "metrics": metrics,
            "headline": self.headline or metrics[0],
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_data()
        self._check_scores(known)

    def _check_data(self) -> None:
        """Check how rows are read and divided."""
        columns, share = (*self.columns, self.label_column), self.validation_share
        if len(set(columns)) != len(columns) or len(columns) not in (2, 3):
            raise InputError(
                "columns must be one or two text columns beside the label column, "
                f"got {', '.join(columns)}; name other columns"
            )
        if RESERVED_COLUMNS & set(self.columns):
            raise InputError(
                f"columns must have other names than {', '.join(sorted(RESERVED_COLUMNS))}, which "
                f"tables of predictions add, got {', '.join(self.columns)}; rename the column"
            )
        if not 0 < share < 1:
            raise InputError(
                f"validation_share must be above 0 and below 1, got {share}; 0.1 is usual"
            )
        check_seed(self.split_seed, "split_seed")

    def _check_scores(self, known: tuple[str, ...]) -> None:
        """Check labels, range and metrics, which must be of those `known`."""
        if self.labels is not None and not len(set(self.labels)) == len(self.labels) >= 2:
            raise InputError(
                "labels must be at least two different classes, "
                f"got {', '.join(self.labels) or 'none'}; null is a regression"
            )
        if self.value_range and not (
            self.is_regression and self.value_range[0] < self.value_range[1]
        ):
            raise InputError(
                "value_range must be the lowest and the highest label, and null for classes, "
                f"got {self.value_range}; leave it out"
            )
        if unknown := [name for name in self.metrics if name not in known]:
            raise InputError(
                f"metrics must be of {', '.join(known)}, got {', '.join(unknown)}; "
                "leave it out for the default"
            )
        if self.headline not in self.metrics:
            listed = ", ".join(self.metrics)
            raise InputError(f"headline must be one of {listed}, got {self.headline}; leave it out")
        if "f1" in self.metrics and self.num_labels != 2:
            raise InputError(
                f"metrics must be macro_f1 here, got f1 for {self.num_labels} classes; correct it"
            )

    @property
    def splits(self) -> Mapping[str, int | None]:
        """Split -> official number of rows, None for tasks that are not GLUE's."""
        splits = {"train": None, "validation": None} | ({"test": None} if self.test else {})
        return OFFICIAL_ROWS.get(self.name, splits)

    @property
    def is_glue(self) -> bool:
        """Whether GLUE has this task."""
        return self.name in OFFICIAL_ROWS

    @property
    def is_own(self) -> bool:
        """Whether the task names its data itself: neither GLUE's nor the demo's."""
        return self.train is not None

    def source(self, split: str) -> str | None:
        """File, or split of the hub, that has the rows of a split of your own task."""
        is_held_out = split == "validation" and not self.validation
        return self.train if is_held_out else getattr(self, split)

    @property
    def is_regression(self) -> bool:
        """Whether a number is predicted, not a class."""
        return self.labels is None

    @property
    def validation_splits(self) -> tuple[str, ...]:
        """The splits that are scored, of which MNLI has two."""
        return tuple(split for split in self.splits if split.startswith("validation"))

    @property
    def num_labels(self) -> int:
        """Number of outputs of the classification head; 1 for a regression."""
        return 1 if self.labels is None else len(self.labels)

    @property
    def missing_label(self) -> float:
        """Label of a test row that has none: -1, or nan where -1 can be a label."""
        lowest, highest = self.value_range or (-math.inf, math.inf)
        return math.nan if self.is_regression and lowest <= -1 <= highest else -1.0

    def is_missing(self, labels: NDArray) -> NDArray[np.bool_]:
        """Whether each of the test labels [N] stands for none."""
        return np.isnan(labels) | (labels == self.missing_label)

    def is_official(self, rows: Mapping[str, int]) -> bool:
        """Whether this is a GLUE task and each split in `rows` has its official number of rows."""
        return self.is_glue and all(self.splits[split] == count for split, count in rows.items())

    def dataset_name(self, rows: Mapping[str, int]) -> str:
        """Name the task with its rows: `mnli`, or `mnli (9k)` when rows are missing."""
        if not self.is_glue or self.is_official(rows):
            return self.name
        train = rows["train"]
        return f"{self.name} ({f'{train / 1000:.0f}k' if train >= 1000 else train})"


OFFICIAL_ROWS: dict[str, dict[str, int | None]] = {
    "cola": {"train": 8551, "validation": 1043, "test": 1063},
    "sst2": {"train": 67349, "validation": 872, "test": 1821},
    "mrpc": {"train": 3668, "validation": 408, "test": 1725},
    "stsb": {"train": 5749, "validation": 1500, "test": 1379},
    "qqp": {"train": 363846, "validation": 40430, "test": 390965},
    "mnli": {
        "train": 392702,
        "validation_matched": 9815,
        "validation_mismatched": 9832,
        "test_matched": 9796,
        "test_mismatched": 9847,
    },
    "qnli": {"train": 104743, "validation": 5463, "test": 5463},
    "rte": {"train": 2490, "validation": 277, "test": 3000},
    "wnli": {"train": 635, "validation": 71, "test": 146},
    "ax": {"test": 1104},
}
"""GLUE's tasks: split -> number of rows."""


def _row(
    name: str,
    title: str,
    columns: tuple[str, ...],
    labels: tuple[str, ...] | None,
    *metrics: str,
    **options: Any,
) -> Task:
    return Task(name=name, title=title, columns=columns, labels=labels, metrics=metrics, **options)


_SENTENCES = ("sentence1", "sentence2")
_NLI = ("premise", "hypothesis")
_NLI_LABELS = ("entailment", "neutral", "contradiction")

_ROWS = (
    _row("cola", "CoLA", ("sentence",), ("unacceptable", "acceptable"), "matthews"),
    _row("sst2", "SST-2", ("sentence",), ("negative", "positive"), "accuracy"),
    _row("mrpc", "MRPC", _SENTENCES, ("not_equivalent", "equivalent"), "f1", "accuracy"),
    _row("stsb", "STS-B", _SENTENCES, None, "pearson", "spearman", headline="spearman",
         value_range=(0, 5)),
    _row("qqp", "QQP", ("question1", "question2"), ("not_duplicate", "duplicate"),
         "f1", "accuracy"),
    _row("mnli", "MNLI m/mm", _NLI, _NLI_LABELS, "accuracy"),
    _row("qnli", "QNLI", ("question", "sentence"), ("entailment", "not_entailment"), "accuracy"),
    _row("rte", "RTE", _SENTENCES, ("entailment", "not_entailment"), "accuracy"),
    _row("wnli", "WNLI", _SENTENCES, ("not_entailment", "entailment"), "accuracy"),
    # the diagnostic set, predicted by models fine-tuned on mnli
    _row("ax", "AX", _NLI, _NLI_LABELS, "matthews"),
    _row("demo-order", "", ("sentence",), ("natural", "reversed"), "accuracy"),
)  # fmt: skip

TASKS: dict[str, Task] = {task.name: task for task in _ROWS}


def load_task(name: str) -> Task:
    """Get a task to train on: a row of `TASKS` by its name, or a YAML file by its path.

    Raises:
        InputError: There is no such task, it has no training rows, or the file is wrong.
    """
    if name in TASKS and "train" in TASKS[name].splits:
        return TASKS[name]
    if Path(name).suffix in (".yaml", ".yml"):
        if not Path(name).is_file():
            raise InputError(f"task must be a file, got {name}; check the path")
        return _read_task(name, Path(name).stat().st_mtime_ns)
    known = ", ".join(name for name, task in TASKS.items() if "train" in task.splits)
    remedy = "describe data of your own by python -m finetune.describe_task"
    if name == "ax":
        remedy = "fine-tune mnli, which predicts ax"
    raise InputError(f"task must be one of {known}, or a YAML file, got {name!r}; {remedy}")


@functools.cache  # a grid asks for each run; a file with another `modified` is read again
def _read_task(file: str, modified: int) -> Task:
    return task_from_fields(vars(parse_settings(TaskDescription, ["--config", file])), file)


def task_from_fields(values: Mapping[str, Any], file: str) -> Task:
    """Make a task from the fields of a YAML file, whose name is the default of `name`.

    Raises:
        InputError: A field is wrong.
    """
    name = values["name"] or Path(file).stem
    if name in TASKS:
        raise InputError(
            f"name of {file} must not be that of a task of the table, got {name}; choose another"
        )
    if values["train"] is None:
        raise InputError(f"train of {file} must name the training rows, got null; name a file")
    return Task(**{**values, "name": name})


def recorded_task(result: Mapping[str, Any]) -> Task:
    """Get the task of a result: a row of `TASKS`, or the description in it."""
    return TASKS.get(result["task"]) or Task(**result["description"])


def description_field(task: Task) -> dict[str, Any]:
    """Make the field `description` of a result; rows of `TASKS` need none."""
    return {} if task.name in TASKS else {"description": dataclasses.asdict(task)}
