"""The table of tasks: columns, labels, splits with their official sizes, and metrics.

Source: Wang et al. 2019, "GLUE" (arXiv:1804.07461); column names and label ids are those of
`nyu-mll/glue`, headline metrics those of the RoFormer paper (F1 for MRPC and QQP, Spearman for
STS-B, accuracy otherwise) and Matthews for CoLA. The demo tasks have GLUE's schemas but are not
GLUE. Results on a split without its official number of rows are not official either.
"""

from collections.abc import Mapping
from dataclasses import dataclass

HUB_DATA = "nyu-mll/glue"
"""Hub id of GLUE."""


@dataclass(frozen=True)
class Task:
    """A task: one row of the table.

    Attributes:
        name: Folder name, and configuration name in `nyu-mll/glue`.
        title: Name in tables.
        columns: One or two text columns, in the order of the model's input.
        labels: Names of the classes in the order of their ids; None for a regression on [0, 5].
        splits: Split -> official number of rows, None for the demo tasks.
        metrics: Keys of `finetune.metrics.METRICS`, all reported.
        headline: The one of `metrics` that tables show.
        official: Whether GLUE has this task.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    labels: tuple[str, ...] | None
    splits: Mapping[str, int | None]
    metrics: tuple[str, ...]
    headline: str
    official: bool = True

    @property
    def validation_splits(self) -> tuple[str, ...]:
        """The splits that are scored, of which MNLI has two."""
        return tuple(split for split in self.splits if split.startswith("validation"))

    @property
    def num_labels(self) -> int:
        """Number of outputs of the classification head; 1 for a regression."""
        return 1 if self.labels is None else len(self.labels)

    def is_official(self, rows: Mapping[str, int]) -> bool:
        """Whether this is a GLUE task and each split in `rows` has its official number of rows."""
        return self.official and all(self.splits[split] == count for split, count in rows.items())

    def result_label(self, rows: Mapping[str, int]) -> str:
        """Name a result by its data: `mnli`, or `mnli (9k)` when rows are missing."""
        if not self.official or self.is_official(rows):
            return self.name
        train = rows["train"]
        return f"{self.name} ({f'{train / 1000:.0f}k' if train >= 1000 else train})"


_PAIR = ("sentence1", "sentence2")
_NLI = ("premise", "hypothesis")
_NLI_LABELS = ("entailment", "neutral", "contradiction")
_DEMO_SPLITS = {"train": None, "validation": None}


def _rows(train: int, validation: int, test: int) -> dict[str, int | None]:
    return {"train": train, "validation": validation, "test": test}


_MNLI_ROWS: dict[str, int | None] = {
    "train": 392702,
    "validation_matched": 9815,
    "validation_mismatched": 9832,
    "test_matched": 9796,
    "test_mismatched": 9847,
}

_ROWS = (
    Task("cola", "CoLA", ("sentence",), ("unacceptable", "acceptable"), _rows(8551, 1043, 1063),
         ("matthews",), "matthews"),
    Task("sst2", "SST-2", ("sentence",), ("negative", "positive"), _rows(67349, 872, 1821),
         ("accuracy",), "accuracy"),
    Task("mrpc", "MRPC", _PAIR, ("not_equivalent", "equivalent"), _rows(3668, 408, 1725),
         ("f1", "accuracy"), "f1"),
    Task("stsb", "STS-B", _PAIR, None, _rows(5749, 1500, 1379),
         ("pearson", "spearman"), "spearman"),
    Task("qqp", "QQP", ("question1", "question2"), ("not_duplicate", "duplicate"),
         _rows(363846, 40430, 390965), ("f1", "accuracy"), "f1"),
    Task("mnli", "MNLI m/mm", _NLI, _NLI_LABELS, _MNLI_ROWS, ("accuracy",), "accuracy"),
    Task("qnli", "QNLI", ("question", "sentence"), ("entailment", "not_entailment"),
         _rows(104743, 5463, 5463), ("accuracy",), "accuracy"),
    Task("rte", "RTE", _PAIR, ("entailment", "not_entailment"), _rows(2490, 277, 3000),
         ("accuracy",), "accuracy"),
    Task("wnli", "WNLI", _PAIR, ("not_entailment", "entailment"), _rows(635, 71, 146),
         ("accuracy",), "accuracy"),
    # the diagnostic set, predicted by models fine-tuned on mnli
    Task("ax", "AX", _NLI, _NLI_LABELS, {"test": 1104}, ("matthews",), "matthews"),
    Task("demo-order", "demo-order", ("sentence",), ("natural", "shuffled"), _DEMO_SPLITS,
         ("accuracy",), "accuracy", official=False),
    Task("demo-next", "demo-next", _PAIR, ("other", "next"), _DEMO_SPLITS,
         ("accuracy",), "accuracy", official=False),
    Task("demo-overlap", "demo-overlap", _PAIR, None, _DEMO_SPLITS,
         ("pearson", "spearman"), "spearman", official=False),
)  # fmt: skip

TASKS: dict[str, Task] = {task.name: task for task in _ROWS}
