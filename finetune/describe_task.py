"""Describe a task of your own in a YAML file, which `--task` of every command takes.

    python -m finetune.describe_task --train reviews.csv --columns '[review]' \
        --label_column sentiment --output reviews.yaml

The classes are found in the training rows and written down with the rest. All rows are read and
checked as fine-tuning reads them.
"""

import dataclasses
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import yaml

from finetune.data import (
    Columns,
    format_label,
    read_rows,
    read_split_columns,
    shorten_list,
    to_number,
)
from finetune.tasks import Task, TaskDescription, task_from_fields
from train.atomic_dir import check_writable, report_full_disk, write_text_atomically
from train.command_line import run_command
from train.settings import InputError


@dataclass(frozen=True, kw_only=True)
class DescribeSettings(TaskDescription):
    """Write the YAML file of a task, with the classes that the training rows have."""

    regression: bool = False
    """The labels are numbers to predict, not classes."""
    output: str
    """YAML file to write."""

    def __post_init__(self) -> None:
        path = Path(self.output)
        if path.suffix not in (".yaml", ".yml"):
            raise InputError(f"output must be a .yaml file, got {self.output}; add .yaml")
        if self.regression and self.labels is not None:
            found = shorten_list(self.labels)
            raise InputError(f"labels must be null for a regression, got {found}; leave one out")
        check_writable(path.parent, "output")


def main(settings: DescribeSettings) -> None:
    """Find the classes, write the file, read all splits and print what they hold."""
    values = {name: x for name, x in vars(settings).items() if name not in ("output", "regression")}
    labels = settings.labels
    if labels is None and not settings.regression:
        # two classes stand in until they are found; metrics are checked with the real ones
        stand_in = {"labels": ("0", "1"), "metrics": (), "headline": ""}
        labels = find_classes(task_from_fields(values | stand_in, settings.output))
    task = task_from_fields(values | {"labels": labels}, settings.output)
    splits = {split: read_split_columns(task, split, None) for split in task.splits}
    text = yaml.dump(dataclasses.asdict(task), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    file = Path(settings.output)
    if file.exists() and (file.is_dir() or file.read_bytes() != text.encode()):
        raise InputError(
            f"output must be new, or what would be written, got {file}, which may have been "
            "edited; delete it, or choose another"
        )
    with report_full_disk(file.parent, "output"):
        write_text_atomically(file, text)
    rows = len(splits["train"]["label"])
    if task.num_labels > rows / 2:
        found = f"{task.num_labels} classes in {rows} rows"
        print(f"warning: {found}: is {task.label_column} the label?", file=sys.stderr)
    remedy = "add rows" if task.validation else "change split_seed"
    for split, (index, name) in product(("train", "validation"), enumerate(task.labels or ())):
        if index not in splits[split]["label"]:
            print(f"warning: class {name} has no row in {split}; {remedy}", file=sys.stderr)
    known = set(zip(*(splits["train"][name] for name in task.columns)))
    for split, columns in splits.items():
        print(f"{split}: {describe_rows(task, columns)}")
        shared = sum(texts in known for texts in zip(*(columns[name] for name in task.columns)))
        if split != "train" and shared:
            print(f"warning: {shared} rows of {split} are also in train", file=sys.stderr)
    print(f"task written to {settings.output}; fine-tune with --task {settings.output}")


class _Dumper(yaml.SafeDumper):
    """Quotes a class named 1e3, which is a float to the loader of settings, and not to PyYAML."""


_FLOAT = re.compile(r"[-+]?[\d.]+[eE][-+]?\d+$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def find_classes(task: Task) -> tuple[str, ...]:
    """Find the class names of the training rows: numbers in their order, else the alphabet's.

    Raises:
        InputError: The labels are numbers with decimals.
    """
    source, columns = read_rows(task, "train", None)
    names = [format_label(value) for value in columns[task.label_column]]
    found = {name: to_number(name) for name in names if name is not None}
    fractions = sorted(name for name, x in found.items() if math.isfinite(x) and x % 1)
    if fractions:
        raise InputError(
            f"{task.label_column} of {source} must be classes, got "
            f"{shorten_list(fractions, 3)}; give --regression true for numbers"
        )
    if not all(abs(x) < 2**53 for x in found.values()):  # floats hold integers up to there
        return tuple(sorted(found))
    shortest_last = sorted(found, key=len, reverse=True)  # of 1, 1.0 and 01, which are equal
    by_number = {found[name]: name for name in shortest_last}
    return tuple(name for _, name in sorted(by_number.items()))


def describe_rows(task: Task, columns: Columns) -> str:
    """Say how many rows a split has, and of which classes or values."""
    labels = columns["label"]
    known = labels[~task.is_missing(labels)]
    if not len(known):
        text = "no labels"
    elif task.labels is None:
        text = f"values from {known.min():g} to {known.max():g}, mean {known.mean():.4g}"
    else:
        counts = Counter(known.tolist())
        text = shorten_list([f"{name} {counts[i]:,}" for i, name in enumerate(task.labels)])
    return f"{len(labels):,} rows: {text}"


if __name__ == "__main__":
    run_command(main, DescribeSettings)
