"""From the files of a task to batches: rows read and checked, tokenized once, bucketed by length.

Local files are read here, without copies in a cache; the `datasets` library reads the hub. Where a
task has no validation rows, a share of its training rows is held out. Tokens are cached under a
hash of the texts and the tokenizer, so that all runs of a grid share them. The order of examples is
a pure function of (seed, epoch), for any number of processes.

Shapes: N examples, K texts of an example (2 where pairs are encoded separately, else 1), B batch, L
tokens of the longest text of a batch, T tokens of a split.
"""

import csv
import functools
import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import datasets
import numpy as np
import pyarrow
import torch
from datasets.exceptions import DatasetsError
from numpy.typing import NDArray
from pyarrow import parquet
from safetensors.numpy import load_file, save
from torch import Tensor

from finetune.tasks import HUB_DATA, PREDICTION_COLUMNS, Task
from train.atomic_dir import report_full_disk, write_file_atomically
from train.data import vocabulary
from train.data.stateless_rng import permute
from train.loop.language_model import check_length
from train.settings import InputError, first_line

Columns = dict[str, Any]
"""Text columns, N strings each, and `label`, [N]."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character, as an escape of .jsonl can leave it; tokenizers refuse it."""
SUFFIXES = (".parquet", ".jsonl", ".tsv", ".csv")
Rows = NDArray[np.int64]
"""Indices of rows of a split."""
ROW = "row {}, counted from 0"
"""How messages name a row: as predictions and analyses of mistakes number them."""
UNREADABLE, MISSING = math.inf, math.nan
"""What stands for a label that is no class and no number, and for none, until they are checked."""
ROWS_PER_CALL = 1024
"""Rows per call of the tokenizer, whose result takes 240 bytes a token."""
BUCKET_BATCHES = 32
"""Batches whose examples are sorted together: 1 % of the tokens are padding at length 512."""


def read_split_columns(task: Task, split: str, glue_dir: str | None) -> Columns:
    """Read and validate the text columns of a split, lists of N strings, and `label`, [N].

    Raises:
        InputError: The data are missing or do not match the task.
    """
    source, table = read_rows(task, split, glue_dir)
    is_test = split.startswith("test")
    is_divided = task.is_own and task.validation is None and not is_test
    texts = {column: table[column] for column in task.columns}
    _check_texts(texts, source, is_test)
    counted = table.get("idx", []) if is_test and not task.is_own else []
    index = [str(format_label(x)) for x in counted]
    if index != [*map(str, range(len(index)))]:  # as the test server counts
        shown = shorten_list(index)
        raise InputError(f"idx of {source} must count from 0, got {shown}; sort the rows")
    values = table.get(task.label_column, [None] * len(table[task.columns[0]]))
    columns = {**texts, "label": _convert_labels(values, task, source, is_test)}
    return _hold_out(columns, task, split) if is_divided else columns


def read_rows(task: Task, split: str, glue_dir: str | None) -> tuple[str, dict[str, list]]:
    """Read all columns of the file or data set of a split, as they are.

    Returns:
        The file, or the data set's name, configuration and split; and the columns.

    Raises:
        InputError: The file, the data set or a column is missing.
    """
    if task.hub is not None or (not task.is_own and glue_dir is None):
        source, table = _read_hub(task, split)
    else:
        file = find_split_file(task, split, glue_dir)
        if file is None:
            rule = f"must hold {task.name}/{split} as one of {', '.join(SUFFIXES)}"
            raise InputError(f"glue_dir {rule}, got {glue_dir}; check the path")
        source, table = str(file), _read_file(file)
    wanted = [*task.columns, *([] if split.startswith("test") else [task.label_column])]
    if not table.keys() >= {*wanted}:
        raise InputError(
            f"{source} must have the columns {', '.join(wanted)}, got {', '.join(table)}; "
            "correct the file or the task's columns"
        )
    if task.is_own and split == "test" and (taken := PREDICTION_COLUMNS & table.keys()):
        raise InputError(
            f"{source} must not have the columns of predictions, got {min(taken)}; rename it"
        )
    if not table[wanted[0]]:
        raise InputError(f"{source} must hold at least one row, got none; fill the split")
    return source, table


def find_split_file(task: Task, split: str, glue_dir: str | None) -> Path | None:
    """Find the file of a split; None if there is none, or if the hub has it."""
    if task.is_own:
        source = task.source(split)
        return None if task.hub or not source else Path(source)
    if glue_dir is None:
        return None
    files = (Path(glue_dir) / task.name / f"{split}{suffix}" for suffix in SUFFIXES)
    return next((path for path in files if path.is_file()), None)


def _read_hub(task: Task, split: str) -> tuple[str, dict[str, list]]:
    name, config = (task.hub, task.hub_config) if task.hub else (HUB_DATA, task.name)
    part = task.source(split) if task.is_own else split
    source = " ".join(filter(None, (name, config, part)))
    try:
        data = datasets.load_dataset(name, config, split=part)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise InputError(
            f"hub must hold {source}, got {first_line(error)}; "
            "check the names, or without a connection name files (for GLUE --glue_dir FOLDER)"
        ) from error
    columns, feature = data.to_dict(), data.features.get(task.label_column)
    if task.hub is not None and isinstance(feature, datasets.ClassLabel):
        names = dict(enumerate(feature.names))  # -1 marks a missing label
        columns[task.label_column] = [names.get(x) for x in columns[task.label_column]]
    return source, columns


def _read_file(file: Path) -> dict[str, list]:
    """Read the columns of a file; those of .csv and .tsv are text, also NA, null and numbers."""
    if file.suffix not in SUFFIXES:
        found = file.suffix or "no suffix"
        raise InputError(f"{file} must be one of {', '.join(SUFFIXES)}, got {found}; convert it")
    if not file.is_file():
        raise InputError(f"{file} must be a file, got none; check the path")
    try:
        if file.suffix == ".parquet":
            return parquet.read_table(file).to_pydict()
        # Windows programs begin a file with a byte order mark
        with file.open(encoding="utf-8-sig", newline="") as stream:
            return _read_jsonl(stream) if file.suffix == ".jsonl" else _read_csv(stream, file)
    except (OSError, ValueError, RecursionError, csv.Error, pyarrow.ArrowException) as error:
        rule, found = f"must be readable as {file.suffix}", first_line(error)
        raise InputError(f"{file} {rule}, got {found}; correct the file") from error


def _read_jsonl(stream: TextIO) -> dict[str, list]:
    rows = [json.loads(line) for line in stream if line.strip()]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"a {type(row).__name__} instead of an object in {ROW.format(number)}")
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _read_csv(stream: TextIO, file: Path) -> dict[str, list]:
    csv.field_size_limit(2**31 - 1)
    # in GLUE's .tsv files quotes are text
    tsv: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    reader = csv.reader(stream, **(tsv if file.suffix == ".tsv" else {"strict": True}))
    try:
        rows = list(reader)
    except csv.Error as error:
        raise ValueError(f"{error} in line {reader.line_num}") from error
    filled = [number for number, row in enumerate(rows) if row]
    header, *rest = rows[filled[0] : filled[-1] + 1] if filled else [[]]
    header = [name or f"Unnamed: {index}" for index, name in enumerate(header)]  # as in pandas
    if file.suffix == ".csv" and len(header) == 1 and ";" in header[0]:
        raise ValueError("columns separated by semicolons instead of commas")
    # in one column a blank line is an empty text
    rest = [row or [""] for row in rest if row or len(header) == 1]
    if twice := {name for name in header if header.count(name) > 1}:
        raise ValueError(f"two columns {min(twice)}")
    for number, row in enumerate(rest):
        if len(row) != len(header):
            found = ROW.format(number)
            raise ValueError(f"{len(row)} values for {len(header)} columns in {found}")
    return dict(zip(header, map(list, zip(*rest)))) if rest else {name: [] for name in header}


def _check_texts(texts: dict[str, list], source: str, is_test: bool) -> None:
    # blank text is allowed where official data have it: in test splits, and in one text of a pair,
    # as in two training rows of QQP
    for row, values in enumerate(zip(*texts.values())):
        is_allowed = is_test or any(str(text).strip() for text in values)
        for column, text in zip(texts, values):
            if not (isinstance(text, str) and is_allowed) or LONE_SURROGATE.search(text):
                rule = f"column {column} of {source} must hold text"
                raise InputError(f"{rule}, got {text!r} in {ROW.format(row)}; correct the file")


def _convert_labels(values: list, task: Task, source: str, is_test: bool) -> NDArray:
    """Convert labels to int64 class ids or float32 values, [N].

    Labels are names of classes; if the names are numbers, 1 and 1.0 are equal. If the names are not
    numbers and no row holds one of them, labels are ids. Test labels may be missing.
    """
    texts = [format_label(value) for value in values]
    ids = {label: float(index) for index, label in enumerate(task.labels or ())}
    named = {to_number(label): index for label, index in ids.items()}
    are_numbers = len(named) == len(ids) and all(map(math.isfinite, named))
    if ids and are_numbers:
        named.setdefault(task.missing_label, task.missing_label)  # unless a class is named -1
        numbers = np.array([named.get(to_number(text), UNREADABLE) for text in texts])
    elif ids.keys() & set(texts):
        numbers = np.array([ids.get(text or "", UNREADABLE) for text in texts])
    else:
        numbers = np.array([to_number(text) for text in texts])
    numbers[[text is None for text in texts]] = MISSING
    if task.labels is None:
        lowest, highest = task.value_range or (-math.inf, math.inf)
        rule = "must be numbers" + (f" from {lowest} to {highest}" if task.value_range else "")
        valid = np.abs(numbers) <= np.finfo(np.float32).max  # no nan either
    else:
        lowest, highest = 0, task.num_labels - 1
        rule = f"must be {shorten_list(task.labels)}"
        rule += "" if are_numbers else f", or ids from 0 to {highest}"
        valid = numbers == np.floor(numbers)
    valid &= (numbers >= lowest) & (numbers <= highest)
    if is_test:
        missing = task.is_missing(numbers)
        numbers[missing] = task.missing_label
        valid |= missing
    if not valid.all():
        row = int(valid.argmin())
        raise InputError(
            f"{task.label_column} of {source} {rule}, got {values[row]!r} in {ROW.format(row)}; "
            "correct the file or the task's labels"
        )
    return numbers.astype(np.float32 if task.is_regression else np.int64)


def format_label(value: Any) -> str | None:
    """Write a label as the name of a class, whole numbers without decimals; None if missing."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_missing = value is None or (isinstance(value, float) and math.isnan(value))
    return None if is_missing else str(value).strip() or None


def to_number(text: str | None) -> float:
    """Convert a label; `UNREADABLE` if it is not a number."""
    try:
        return float(text or "")
    except ValueError:
        return UNREADABLE


def shorten_list(names: Sequence[str], count: int = 10) -> str:
    """List names, the first ones of many."""
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest


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


@dataclass(frozen=True)
class Examples:
    """The tokenized rows of one split.

    Attributes:
        inputs: Name of a model input, except the attention mask -> values of all examples
            concatenated, [T].
        text_lengths: Tokens per text, [N, K].
        full_lengths: The same before truncation.
        labels: Class ids, int64, or values, float32; `Task.missing_label` for none; [N].
        padding: Padding value of each input.
    """

    inputs: dict[str, NDArray[np.int32]]
    text_lengths: NDArray[np.int64]
    full_lengths: NDArray[np.int64]
    labels: NDArray
    padding: dict[str, int]

    @functools.cached_property
    def starts(self) -> NDArray[np.int64]:
        """Offset of each text, [N, K]; the K texts of an example are neighbours."""
        ends = np.cumsum(self.text_lengths).reshape(self.text_lengths.shape)
        return ends - self.text_lengths

    @functools.cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of the longest text of each example, [N]."""
        return self.text_lengths.max(axis=1)

    @property
    def truncation(self) -> dict[str, float]:
        """Share of the texts that are truncated, and of all tokens that are cut off."""
        cut = self.full_lengths - self.text_lengths
        tokens = cut.sum() / self.full_lengths.sum()
        return {"texts": round(float((cut > 0).mean()), 4), "tokens": round(float(tokens), 4)}

    def __len__(self) -> int:
        return len(self.labels)

    def micro_batches(self, rows: Rows, max_tokens: int, processes: int) -> list[Rows]:
        """Split rows [B]: each process has at most `max_tokens` padded tokens, or one row."""
        row_tokens = self.text_lengths.shape[1] * int(self.lengths[rows].max())
        size = processes * max(1, max_tokens // row_tokens)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def batch(self, rows: Rows, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Collate rows [B] to model inputs [B * K, L], padded to the longest, and `labels` [B]."""
        lengths, starts = self.text_lengths[rows].ravel(), self.starts[rows].ravel()  # [B * K]
        columns = np.arange(lengths.max())
        mask = columns < lengths[:, None]  # [B * K, L]
        indices = np.where(mask, starts[:, None] + columns, 0)
        arrays = {"attention_mask": mask.astype(np.int64), "labels": self.labels[rows]}
        for name, values in self.inputs.items():
            arrays[name] = np.where(mask, values[indices], self.padding[name]).astype(np.int64)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if torch.device(device).type != "cuda":
            return {name: tensor.to(device) for name, tensor in tensors.items()}
        # copies from pageable memory would block the host
        return {name: x.pin_memory().to(device, non_blocking=True) for name, x in tensors.items()}


def make_examples(
    task: Task,
    columns: Columns,
    tokenizer: Any,
    length: int,
    cache: str,
    pair_encoding: str,
) -> Examples:
    """Tokenize one split, read by `read_split_columns`; the settings are those of `CommonSettings`.

    With the separate encoding of pairs each of the K = 2 texts has up to `length` tokens.
    """
    texts = [columns[name] for name in task.columns]
    if pair_encoding == "separate":
        texts = [[text for row in zip(*texts) for text in row]]
    tokens = tokenize(texts, tokenizer, length, cache)
    labels = columns["label"]
    text_lengths, full_lengths = (
        tokens.pop(name).astype(np.int64).reshape(len(labels), -1)
        for name in ("lengths", "full_lengths")
    )
    padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    padding = {name: padding.get(name, 0) for name in tokens}
    return Examples(tokens, text_lengths, full_lengths, labels, padding)


def tokenize(
    texts: list[list[str]], tokenizer: Any, length: int, cache: str
) -> dict[str, NDArray[np.int32]]:
    """Tokenize N rows of one or two texts, or load their tokens from the cache.

    Returns:
        Each model input except the attention mask, [T]; `lengths`, and `full_lengths` without
        truncation, [N].
    """
    shape = len(texts), len(texts[0])
    options = type(tokenizer).__name__, tokenizer.truncation_side, *tokenizer.model_input_names
    state = " ".join((*options, vocabulary.tokenizer_state(tokenizer)))
    key = hashlib.sha256(repr((state, length, shape)).encode())
    for column in texts:
        key.update(repr(column).encode())
    file = Path(cache) / f"task-{key.hexdigest()[:20]}.safetensors"
    if not file.exists():
        parts: dict[str, list[NDArray[np.int32]]] = defaultdict(list)
        for start in range(0, len(texts[0]), ROWS_PER_CALL):
            chunk = [column[start : start + ROWS_PER_CALL] for column in texts]
            encoded = tokenizer(*chunk)
            parts["full_lengths"] += [
                np.array([len(row) for row in encoded["input_ids"]], np.int32)
            ]
            if parts["full_lengths"][-1].max() > length:
                encoded = tokenizer(*chunk, truncation="longest_first", max_length=length)
            for name in encoded:
                if name != "attention_mask":
                    parts[name] += [np.asarray(row, np.int32) for row in encoded[name]]
        arrays = {name: np.concatenate(rows) for name, rows in parts.items()}
        arrays["lengths"] = np.array([len(row) for row in parts["input_ids"]], np.int32)
        with report_full_disk(Path(cache), "cache"), write_file_atomically(file) as unfinished:
            unfinished.write_bytes(save(arrays))
    return load_file(file)


def epoch_batches(
    lengths: NDArray[np.int64], batch_size: int, seed: int, epoch: int
) -> Iterator[Rows]:
    """Iterate over the batches of an epoch: each row once, rows of similar length together.

    Rows are permuted, sorted by length within windows of `BUCKET_BATCHES` batches and cut into
    batches, which are permuted. The last batch cut may be smaller. `lengths` are tokens per
    example, [N].

    Yields:
        Row numbers, [B].
    """
    rows = permute(np.arange(len(lengths)), len(lengths), seed, epoch)
    size = BUCKET_BATCHES * batch_size
    for start in range(0, len(rows), size):
        window = rows[start : start + size]
        rows[start : start + size] = window[np.argsort(lengths[window], kind="stable")]
    count = -(-len(rows) // batch_size)
    for index in permute(np.arange(count), count, seed, epoch, 1):
        yield rows[index * batch_size : (index + 1) * batch_size]


def check_tokenizer(config: Any, tokenizer: Any, length: int) -> None:
    """Check that the model has embeddings for every position and every token id.

    Raises:
        InputError: The length or the tokenizer does not fit.
    """
    check_length(config, length, "length")
    if vocabulary.count_ids(tokenizer) > config.vocab_size:
        raise InputError(
            f"tokenizer must have ids below the model's {config.vocab_size}, got "
            f"{vocabulary.count_ids(tokenizer) - 1}; take the tokenizer the model was trained with"
        )
    if tokenizer.pad_token_id is None:
        raise InputError(
            "tokenizer must have a padding token, got none; set pad_token in its folder"
        )
