"""Describe a task of your own in a YAML file, which `--task` of every command takes.

    python -m finetune.describe_task --train reviews.csv --columns '[review]' \
        --label_column sentiment --output reviews.yaml

The classes are found in the training rows and written down with the rest. All rows are read and
checked as fine-tuning reads them.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune.data import check_splits, format_label, read_rows, read_split_columns, shorten_list
from finetune.tasks import Task, TaskSettings, load_task
from train.atomic_dir import check_writable
from train.command_line import run_command
from train.settings import require

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
        ours = not path.exists() or (path.is_file() and path.read_text().startswith(HEADER))
        rule, remedy = "must be new or a file of this command", "choose another"
        require(ours, "output", rule, self.output, remedy)
        check_writable(path.parent, "output")
        require(self.train is not None, "train", "must name the training rows", "null", "name them")


def main(settings: DescribeSettings) -> None:
    """Find the classes, write the file, read all splits and print what they hold.

    Raises:
        InputError: The data are missing, or do not match the description.
    """
    values = {name: x for name, x in vars(settings).items() if name not in ("output", "regression")}
    name = settings.name or Path(settings.output).stem
    if settings.regression or settings.labels is not None:
        labels = settings.labels
    else:
        # classes of any names stand in until they are found; metrics are checked below
        draft = Task(**values | {"name": name, "labels": ("0", "1"), "metrics": ()})
        labels = find_classes(draft)
    task = Task(**values | {"name": name, "labels": labels})
    splits = {split: read_split_columns(task, split, None) for split in task.splits}
    check_splits(task, splits)
    write_task(task, settings.output)
    load_task(settings.output)
    for split, columns in splits.items():
        print(f"{split}: {describe_rows(task, split, columns['label'])}")
    print(f"task written to {settings.output}; fine-tune with --task {settings.output}")


def find_classes(task: Task) -> tuple[str, ...]:
    """Find the class names of the training rows: numbers in their order, else the alphabet's.

    Raises:
        InputError: A label is missing, or the labels are numbers with decimals.
    """
    # validation rows that were held out count, too: a rare class may be there alone
    splits = ("train",) if task.validation else ("train", "validation")
    values = [x for split in splits for x in read_rows(task, split, None)[task.label_column]]
    names = [format_label(value) for value in values]
    key = f"{task.label_column} of {task.name}/train"
    require(None not in names, key, "must not be empty", "an empty label", "correct the file")
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
    Path(file).write_text(HEADER + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


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
