"""The rows of a task: read from files or the hub, checked, divided into splits.

Local files are read by pyarrow, which makes no copies in a cache; the `datasets` library reads the
hub. Where a task has no validation rows, a share of its training rows is held out.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import csv, json, parquet

from finetune.results import hash_files
from finetune.tasks import HUB_DATA, Task
from train.data.stateless_rng import permute
from train.settings import InputError, first_line

Columns = dict[str, Any]
"""Text columns, N strings each, and `label`, [N]."""
BLOCK_BYTES = 2**26
"""Bytes of .csv, .tsv or .jsonl that are parsed at once; no row may be longer."""
SUFFIXES = (".parquet", ".jsonl", ".tsv", ".csv")


def read_split_columns(task: Task, split: str, glue_dir: str | None) -> Columns:
    """Read and validate the text columns of a split, lists of N strings, and `label`, [N].

    Raises:
        InputError: The data are missing or do not match the task.
    """
    table, is_test = read_rows(task, split, glue_dir), split.startswith("test")
    is_divided = task.is_own and task.validation is None and not is_test
    name = f"{task.name}/{'train' if is_divided else split}"  # rows are counted in the file
    texts = {column: table[column] for column in task.columns}
    _check_texts(texts, name, is_test)
    index = table.get("idx", []) if is_test else []
    if index != list(range(len(index))):  # as the test server counts
        shown = shorten_list([*map(str, index)])
        raise InputError(f"idx of {name} must count from 0, got {shown}; sort the rows")
    values = table.get(task.label_column, [None] * len(table[task.columns[0]]))
    columns = {**texts, "label": _convert_labels(values, task, name, is_test)}
    return _hold_out(columns, task, split) if is_divided else columns


def _check_texts(texts: dict[str, list], name: str, is_test: bool) -> None:
    # blank text is allowed where official data have it: in test splits, and in one text of a pair,
    # as in two training rows of QQP
    for row, values in enumerate(zip(*texts.values())):
        is_allowed = is_test or any(str(text).strip() for text in values)
        for column, text in zip(texts, values):
            if not (isinstance(text, str) and is_allowed):
                rule, found = f"column {column} of {name} must hold text", f"{text!r} in row {row}"
                raise InputError(f"{rule}, got {found}; correct the file")


def _convert_labels(values: list, task: Task, name: str, is_test: bool) -> NDArray:
    """Convert labels to int64 class ids or float32 values, [N].

    Classes are given by name or, if no row has a name, by id. Test labels may be missing.
    """
    texts = [format_label(value) for value in values]
    ids = {label: float(index) for index, label in enumerate(task.labels or ())}
    if ids.keys() & set(texts):
        numbers = np.array([ids.get(text or "", math.inf) for text in texts])
    else:
        numbers = np.array([to_number(text) for text in texts])
    numbers[[text is None for text in texts]] = math.nan
    if task.labels is None:
        lowest, highest = task.value_range or (-math.inf, math.inf)
        rule = f"must be numbers from {lowest} to {highest}"
        valid = np.isfinite(numbers)
    else:
        lowest, highest = 0, task.num_labels - 1
        rule = f"must be {shorten_list(task.labels)}, or ids from 0 to {highest}"
        valid = numbers == np.floor(numbers)
    valid &= (numbers >= lowest) & (numbers <= highest)
    if is_test:
        missing = task.is_missing(numbers)
        numbers[missing] = task.missing_label
        valid |= missing
    if not valid.all():
        row = int(valid.argmin())
        raise InputError(
            f"{task.label_column} of {name} {rule}, got {values[row]!r} in row {row}; "
            "correct the file or the task's labels"
        )
    return numbers.astype(np.float32 if task.is_regression else np.int64)


def format_label(value: Any) -> str | None:
    """Write a label as the name of a class, whole numbers without decimals; None if missing."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_missing = value is None or (isinstance(value, float) and math.isnan(value))
    return None if is_missing else str(value).strip() or None


def shorten_list(names: Sequence[str], count: int = 10) -> str:
    """List names, the first ones of many."""
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest


def to_number(text: str | None) -> float:
    """Convert a label; infinity if it is not a number."""
    try:
        return float(text or "")
    except ValueError:
        return math.inf


def find_split_file(task: Task, split: str, glue_dir: str | None) -> Path | None:
    """Find the file of a split; None if there is none, or if the hub has it."""
    if task.train is not None:
        return None if task.hub else Path(getattr(task, split) or task.train)
    files = (Path(glue_dir or "") / task.name / f"{split}{suffix}" for suffix in SUFFIXES)
    return next((path for path in files if glue_dir and path.is_file()), None)


def hash_task_files(task: Task, glue_dir: str | None) -> str | None:
    """Hash the files of a task's labelled splits; None for the hub.

    Of a task of your own the hash covers what decides how its files are read, too.
    """
    files = [find_split_file(task, x, glue_dir) for x in ("train", *task.validation_splits)]
    content = hash_files(files)
    if not task.is_own:
        return content
    others = ("name", "title", "metrics", "headline", "test")
    source = {name: value for name, value in vars(task).items() if name not in others}
    return hashlib.sha256(repr((content, source)).encode()).hexdigest()[:16]


def read_rows(task: Task, split: str, glue_dir: str | None) -> dict[str, list]:
    """Read the columns that a task names from the file or data set of a split, as they are.

    Raises:
        InputError: The file, the data set or a column is missing.
    """
    if task.hub is not None or (not task.is_own and glue_dir is None):
        source, table = f"{task.hub or HUB_DATA} {split}", _read_hub(task, split)
    else:
        file = find_split_file(task, split, glue_dir)
        if file is None:
            rule = f"must hold {task.name}/{split} as one of {', '.join(SUFFIXES)}"
            raise InputError(f"glue_dir {rule}, got {glue_dir}; check the path")
        source, table = str(file), _read_file(file, task)
    names, label = table.column_names, task.label_column
    wanted = [*task.columns, *([] if split.startswith("test") else [label])]
    if any(names.count(name) != 1 for name in wanted):
        remedy = "correct columns or label_column of the task" if task.is_own else "rename them"
        raise InputError(
            f"{source} must have the columns {', '.join(wanted)}, got {', '.join(names)}; {remedy}"
        )
    if table.num_rows == 0:
        raise InputError(f"{source} must hold at least one row, got none; fill the split")
    index = ["idx"] if not task.is_own else []
    kept = [name for name in (*task.columns, label, *index) if names.count(name) == 1]
    return table.select(kept).to_pydict()


def _hold_out(columns: Columns, task: Task, split: str) -> Columns:
    """Select train or validation of the training rows; equal texts stay on one side."""
    texts = list(zip(*(columns[name] for name in task.columns)))
    distinct = list(dict.fromkeys(texts))
    order = permute(np.arange(len(distinct)), len(distinct), task.split_seed)
    count = max(1, round(task.validation_share * len(distinct)))
    held_out = {distinct[index] for index in order[:count]}
    if count >= len(distinct):
        raise InputError(
            f"train of {task.name} must have several different texts where validation is null, "
            f"got {len(distinct)}; name a validation file"
        )
    kept = [row for row, x in enumerate(texts) if (x in held_out) == (split == "validation")]
    selected: Columns = {name: [columns[name][row] for row in kept] for name in task.columns}
    return selected | {"label": columns["label"][kept]}


def _read_hub(task: Task, split: str) -> pyarrow.Table:
    name, config = (task.hub, task.hub_config) if task.hub else (HUB_DATA, task.name)
    part = split if not task.is_own else getattr(task, split) or task.train
    try:
        data = datasets.load_dataset(name, config, split=part)
    except (OSError, ValueError) as error:
        rule = f"the hub must give {name} where glue_dir is null"
        remedy = "give --glue_dir FOLDER"
        if task.hub:
            rule, remedy = f"hub must hold {name}, split {part}", "check the names"
        raise InputError(f"{rule}, got {first_line(error)}; {remedy}") from error
    table, feature = data.with_format("arrow")[:], data.features.get(task.label_column)
    if task.hub is None or not isinstance(feature, datasets.ClassLabel):
        return table
    # -1 marks a missing label
    labels = [None if x is None or x < 0 else feature.names[x] for x in data[task.label_column]]
    index = table.column_names.index(task.label_column)
    return table.set_column(index, task.label_column, pyarrow.array(labels, pyarrow.string()))


def _read_file(file: Path, task: Task) -> pyarrow.Table:
    if file.suffix not in SUFFIXES:
        found = file.suffix or "no suffix"
        raise InputError(f"{file} must be one of {', '.join(SUFFIXES)}, got {found}; convert it")
    try:
        table = parquet.read_table(file) if file.suffix == ".parquet" else _read_text(file, task)
        table.validate(full=True)  # of jsonl the reader does not check that text is UTF-8
        return table
    except (pyarrow.ArrowException, OSError) as error:
        rule, found = f"must be readable as {file.suffix}", first_line(error)
        raise InputError(f"{file} {rule}, got {found}; correct the file") from error


def _read_text(file: Path, task: Task) -> pyarrow.Table:
    # without types, text that looks like a date would be read as one
    types = {name: pyarrow.string() for name in task.columns}
    if file.suffix == ".jsonl":
        read = json.ReadOptions(block_size=BLOCK_BYTES)
        return json.read_json(file, read, json.ParseOptions(pyarrow.schema(types)))
    # in GLUE's .tsv files quotes are text; NA, null and numbers are text in both formats
    parse = csv.ParseOptions(newlines_in_values=True)
    if file.suffix == ".tsv":
        parse = csv.ParseOptions(delimiter="\t", quote_char=False)
    convert = csv.ConvertOptions(column_types=types | {task.label_column: pyarrow.string()})
    return csv.read_csv(file, csv.ReadOptions(block_size=BLOCK_BYTES), parse, convert)
