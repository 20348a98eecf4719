"""Describe a task of your own in a YAML file, which `--task` of every command takes.

    python -m finetune.describe_task --train reviews.csv --columns '[review]' \
        --label_column sentiment --output reviews.yaml

The classes are found in the training rows and written down with the rest. All rows are read and
checked as fine-tuning reads them.
"""

import dataclasses
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune.task_data import (
    check_splits,
    format_label,
    read_rows,
    read_split_columns,
    shorten_list,
)
from finetune.tasks import Task, TaskSettings, own_task
from train.atomic_dir import check_writable
from train.command_line import run_command
from train.settings import require

LARGE = 10.0
"""A head starts with values near 0 and learns by squared error: far labels take many steps."""
HEADER = "# written by finetune/describe_task.py\n"


@dataclass(frozen=True, kw_only=True)
class DescribeSettings(TaskSettings):
    """Write the YAML file of a task, with the classes that the training rows have."""

    regression: bool = False
    """The labels are numbers to predict, not classes."""
    output: str
    """YAML file to write."""

    def __post_init__(self) -> None:
        path = Path(self.output)
        rule, valid = "must be a .yaml file", path.suffix in (".yaml", ".yml")
        require(valid, "output", rule, self.output, "add .yaml")
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        ours = text.startswith(HEADER) or not path.exists()
        rule, remedy = "must be new or a file of this command", "choose another"
        require(ours, "output", rule, self.output, remedy)
        check_writable(path.parent, "output")


def main(settings: DescribeSettings) -> None:
    """Find the classes, write the file, read all splits and print what they hold.

    Raises:
        InputError: The data are missing, or do not match the description.
    """
    values = {name: x for name, x in vars(settings).items() if name not in ("output", "regression")}
    labels = settings.labels
    if labels is None and not settings.regression:
        # two classes stand in until they are found; metrics are checked with the real ones
        stand_in = {"labels": ("0", "1"), "metrics": (), "headline": ""}
        labels = find_classes(own_task(values | stand_in, settings.output))
    task = own_task(values | {"labels": labels}, settings.output)
    splits = {split: read_split_columns(task, split, None) for split in task.splits}
    check_splits(task, splits)
    write_task(task, settings.output)
    mean, spread = splits["train"]["label"].mean(), splits["train"]["label"].std()
    if task.labels is None and max(abs(mean), spread) > LARGE:
        found = f"mean {mean:.4g}, standard deviation {spread:.4g}"
        print(f"warning: large labels ({found}) train slowly; divide them", file=sys.stderr)
    for split, columns in splits.items():
        print(f"{split}: {describe_rows(task, split, columns['label'])}")
    print(f"task written to {settings.output}; fine-tune with --task {settings.output}")


def find_classes(task: Task) -> tuple[str, ...]:
    """Find the class names of the training rows: numbers in their order, else the alphabet's.

    Raises:
        InputError: A label is missing, or the labels are numbers with decimals.
    """
    names = [format_label(value) for value in read_rows(task, "train", None)[task.label_column]]
    key = f"{task.label_column} of {task.name}/train"
    missing = f"none in row {names.index(None)}" if None in names else ""
    require(not missing, key, "must be in every row", missing, "correct the file")
    found = {name for name in names if name is not None}
    numbers = {name: number for name in found if (number := _to_number(name)) is not None}
    fractions = sorted(name for name, number in numbers.items() if not number.is_integer())
    rule, remedy = "must be classes", "give --regression true for numbers"
    require(not fractions, key, rule, shorten_list(fractions, 3), remedy)
    order = numbers.__getitem__ if numbers.keys() == found else str
    return tuple(sorted(found, key=order))


def write_task(task: Task, file: str) -> None:
    """Write the settings of a task that differ from their defaults, and `labels`."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(TaskSettings):
        value = getattr(task, field.name)
        implied = {"title": task.name, "headline": task.metrics[0]}.get(field.name, field.default)
        if field.name == "labels" or value != implied:
            values[field.name] = list(value) if isinstance(value, tuple) else value
    text = HEADER + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    Path(file).write_text(text, encoding="utf-8")


def describe_rows(task: Task, split: str, labels: Any) -> str:
    """Say how many rows a split has, of which classes or values, and where they come from."""
    known = labels[labels >= 0] if task.labels is not None else labels[labels == labels]
    if not len(known):
        text = "no labels"
    elif task.labels is None:
        text = f"values from {known.min():g} to {known.max():g}, mean {known.mean():.4g}"
    else:
        counts = Counter(known.tolist())
        text = shorten_list([f"{name} {counts[i]:,}" for i, name in enumerate(task.labels)])
    source = ""
    if task.validation is None and split != "test":
        share = f"{100 * task.validation_share:g} % of its texts, seed {task.split_seed}"
        source = f" of {task.train}, {share}" if split == "validation" else f" of {task.train}"
    return f"{len(labels):,} rows{source}: {text}"


def _to_number(name: str) -> float | None:
    try:
        return float(name)
    except ValueError:
        return None


if __name__ == "__main__":
    run_command(main, DescribeSettings)
