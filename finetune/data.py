"""From a task's files to batches: read, validated, tokenized once, bucketed by length.

Local files are read by pyarrow, which makes no copies in a cache; the `datasets` library reads the
hub. Tokens are cached under a hash of the texts and the tokenizer, so that all runs of a grid share
them. The order of examples is a pure function of (seed, epoch), for any number of processes.

Shapes: N examples, K texts of an example (2 where pairs are encoded separately, else 1), B batch, L
tokens of the longest text of a batch, T tokens of a split.
"""

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import torch
from numpy.typing import NDArray
from pyarrow import csv, json, parquet
from safetensors.numpy import load_file, save
from torch import Tensor

from finetune.results import hash_files
from finetune.tasks import HUB_DATA, Task
from train.atomic_dir import report_full_disk
from train.data import vocabulary
from train.data.stateless_rng import permute
from train.settings import InputError, first_line, require

Rows = NDArray[np.int64]
ROWS_PER_CALL = 8192
"""Rows per call of the tokenizer, whose result takes 240 bytes a token."""
BUCKET_BATCHES = 32
"""Batches whose examples are sorted together: 1 % of the tokens are padding at length 512."""


@dataclass(frozen=True)
class Examples:
    """The tokenized rows of one split.

    Attributes:
        inputs: Name of a model input, except the attention mask -> values of all examples
            concatenated, [T].
        text_lengths: Tokens per text, [N * K]; the K texts of an example are neighbours.
        labels: Class ids, int64, or values, float32; -1 where the file has none; [N].
        padding: Padding value of each input.
    """

    inputs: dict[str, NDArray[np.int32]]
    text_lengths: Rows
    labels: NDArray
    padding: dict[str, int]

    @cached_property
    def starts(self) -> Rows:
        """Offset of each text, [N * K]."""
        return np.cumsum(self.text_lengths) - self.text_lengths

    @cached_property
    def lengths(self) -> Rows:
        """Tokens of the longest text of each example, [N]."""
        return self.text_lengths.reshape(len(self), -1).max(axis=1)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Rows, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Collate rows [B] to model inputs [B * K, L], padded to the longest, and `labels` [B]."""
        count = len(self.text_lengths) // len(self)
        texts = (rows[:, None] * count + np.arange(count)).ravel()  # [B * K]
        columns = np.arange(self.lengths[rows].max())
        mask = columns < self.text_lengths[texts, None]  # [B * K, L]
        indices = np.where(mask, self.starts[texts, None] + columns, 0)
        arrays = {"attention_mask": mask.astype(np.int64), "labels": self.labels[rows]}
        for name, values in self.inputs.items():
            arrays[name] = np.where(mask, values[indices], self.padding[name]).astype(np.int64)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if torch.device(device).type != "cuda":
            return {name: tensor.to(device) for name, tensor in tensors.items()}
        # copies from pageable memory would block the host
        return {name: x.pin_memory().to(device, non_blocking=True) for name, x in tensors.items()}


def load_examples(
    task: Task,
    split: str,
    glue_dir: str | None,
    tokenizer: Any,
    length: int,
    cache: str,
    pair_encoding: str = "joint",
) -> Examples:
    """Read, validate and tokenize one split.

    Args:
        task: Defines the columns and labels.
        split: One of the task's splits; labels of a test split may be missing.
        glue_dir: Folder of task folders; None means `nyu-mll/glue` on the hub.
        tokenizer: The model's tokenizer.
        length: Longest input in tokens.
        cache: Folder of cached tokens.
        pair_encoding: joint, or separate for K = 2 texts of `length` tokens each.

    Raises:
        InputError: The data are missing or do not match the task.
    """
    columns = read_split_columns(task, split, glue_dir)
    labels = columns.pop("label")
    texts = list(columns.values())
    if pair_encoding == "separate":
        texts = [[text for row in zip(*texts) for text in row]]
    tokens = tokenize(texts, tokenizer, length, cache)
    lengths = tokens.pop("lengths").astype(np.int64)
    padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    return Examples(tokens, lengths, labels, {name: padding.get(name, 0) for name in tokens})


def read_split_columns(task: Task, split: str, glue_dir: str | None) -> dict[str, Any]:
    """Read and validate the text columns of a split, lists of N strings, and `label`, [N].

    Raises:
        InputError: The data are missing or do not match the task.
    """
    table = _read_hub(task, split) if glue_dir is None else _read_folder(task, split, glue_dir)
    name, is_test = f"{task.name}/{split}", split.startswith("test")
    texts = {column: table[column] for column in task.columns}
    _check_texts(texts, name, is_test)
    _check_index(table.get("idx", []), name, is_test)
    count = len(table[task.columns[0]])
    labels = _check_labels(table.get("label", [-1] * count), task, name, is_test)
    return {**texts, "label": labels}


def _check_texts(texts: dict[str, list], name: str, is_test: bool) -> None:
    # blank text is allowed where official data have it: in test splits, and in one text of a pair,
    # as in two training rows of QQP
    rows = zip(*texts.values())
    allowed = [is_test or any(str(text).strip() for text in row) for row in rows]
    for column, values in texts.items():
        for row, (text, is_allowed) in enumerate(zip(values, allowed)):
            if not (isinstance(text, str) and is_allowed):
                rule, found = f"column {column} of {name} must hold text", f"{text!r} in row {row}"
                raise InputError(f"{rule}, got {found}; correct the file")


def _check_index(index: list, name: str, is_test: bool) -> None:
    first: dict[str, int] = {}  # keyed by repr, because values can be lists
    for row, value in enumerate(index):
        other = first.setdefault(repr(value), row)
        found = f"{value} in rows {other} and {row}"
        require(other == row, f"idx of {name}", "must be unique", found, "remove the duplicates")
    for row, value in enumerate(index if is_test else []):  # the test server matches by idx
        found = f"{value} in row {row}"
        require(value == row, f"idx of {name}", "must count from 0", found, "sort the rows by it")


def _check_labels(values: list, task: Task, name: str, is_test: bool) -> NDArray:
    """Convert labels to int64 class ids or float32 values, [N]; -1 for unknown test labels."""
    is_regression = task.labels is None
    highest, lowest = 5 if is_regression else task.num_labels - 1, -1 if is_test else 0
    labels = np.array([_to_number(value) for value in values])
    if is_test:
        labels = np.where(np.isnan(labels), -1, labels)
    valid = (labels >= lowest) & (labels <= highest)  # False for nan
    if not is_regression:
        valid &= labels == np.floor(labels)
    row = int(valid.argmin())
    rule = f"must be {'numbers' if is_regression else 'ids'} from 0 to {highest}"
    remedy = "correct the file; finetune/tasks.py lists the ids"
    found = f"{values[row]!r} in row {row}"
    require(bool(valid.all()), f"label of {name}", rule, found, remedy)
    return labels.astype(np.float32 if is_regression else np.int64)


def _to_number(value: Any) -> float:
    """Convert a label; nan if it is missing, infinity if it is not a number."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError):
        return math.inf


def tokenize(
    texts: list[list[str]], tokenizer: Any, length: int, cache: str
) -> dict[str, NDArray[np.int32]]:
    """Tokenize N rows of one or two texts, or load their tokens from the cache.

    Returns:
        Each model input except the attention mask, [T], and `lengths`, [N].
    """
    key = hashlib.sha256(repr((identify_tokenizer(tokenizer), length)).encode())
    for column in texts:
        key.update("\0".join([*column, ""]).encode(errors="surrogatepass"))
    file = Path(cache) / f"glue-{key.hexdigest()[:20]}.safetensors"
    if not file.exists():
        parts: dict[str, list[NDArray[np.int32]]] = defaultdict(list)
        for start in range(0, len(texts[0]), ROWS_PER_CALL):
            chunk = [column[start : start + ROWS_PER_CALL] for column in texts]
            encoded = tokenizer(*chunk, truncation="longest_first", max_length=length)
            for name in encoded:
                if name != "attention_mask":
                    parts[name] += [np.asarray(row, np.int32) for row in encoded[name]]
        arrays = {name: np.concatenate(rows) for name, rows in parts.items()}
        arrays["lengths"] = np.array([len(row) for row in parts["input_ids"]], np.int32)
        with report_full_disk(Path(cache), "cache"):
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(f".{os.getpid()}")  # other processes may write it too
            unfinished.write_bytes(save(arrays))
            unfinished.replace(file)
    return load_file(file)


def identify_tokenizer(tokenizer: Any) -> str:
    """Describe all that determines a tokenizer's output: class, options, vocabulary, rules."""
    options = tokenizer.truncation_side, *tokenizer.model_input_names
    return " ".join((type(tokenizer).__name__, *options, vocabulary.tokenizer_state(tokenizer)))


def epoch_batches(lengths: Rows, batch_size: int, seed: int, epoch: int) -> Iterator[Rows]:
    """Iterate over the batches of an epoch: each row once, rows of similar length together.

    Rows are permuted, sorted by length within windows of `BUCKET_BATCHES` batches and cut into
    batches, which are permuted. The last batch cut may be smaller.

    Args:
        lengths: Tokens per example, [N].
        batch_size: Examples of a full batch, B.
        seed: Determines the order, together with the epoch.
        epoch: Counts from 0.

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

    A configuration whose class has `has_position_limit = False` has no position table.

    Raises:
        InputError: The length or the tokenizer does not fit.
    """
    positions, entries = getattr(config, "max_position_embeddings", None), config.vocab_size
    limited = getattr(config, "has_position_limit", True)
    rule = f"must be at most the model's {positions} positions"
    remedy = "shorten it or take a RoFormer, which has no limit"
    fits = positions is None or not limited or length <= positions
    require(fits, "length", rule, length, remedy)
    rule = f"must have at most the model's {entries} entries"
    remedy = "take the tokenizer the model was trained with"
    require(len(tokenizer) <= entries, "tokenizer", rule, len(tokenizer), remedy)
    padded = tokenizer.pad_token_id is not None
    require(padded, "tokenizer", "must have a padding token", "none", "set pad_token in its folder")


def find_split_file(task: Task, split: str, glue_dir: str) -> Path | None:
    """Find the file of a split; None if there is none."""
    files = (Path(glue_dir) / task.name / f"{split}{suffix}" for suffix in _READERS)
    return next((path for path in files if path.is_file()), None)


def hash_task_files(task: Task, glue_dir: str | None) -> str | None:
    """Hash the files of a task's labelled splits; None for the hub."""
    if glue_dir is None:
        return None
    files = (find_split_file(task, split, glue_dir) for split in ("train", *task.validation_splits))
    return hash_files([file for file in files if file is not None])


def _read_hub(task: Task, split: str) -> dict[str, list]:
    try:
        table = datasets.load_dataset(HUB_DATA, task.name, split=split)
    except (OSError, ValueError) as error:
        raise InputError(
            "glue_dir must name a folder where the hub cannot be read, got null "
            f"({first_line(error)}); give --glue_dir FOLDER"
        ) from error
    return table.to_dict()


def _read_folder(task: Task, split: str, glue_dir: str) -> dict[str, list]:
    folder = Path(glue_dir) / task.name
    rule = f"must hold a folder {task.name}"
    require(folder.is_dir(), "glue_dir", rule, glue_dir, "check the path")
    file = find_split_file(task, split, glue_dir)
    if file is None:
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "an empty folder"
        rule = f"must hold {task.name}/{split} as one of {', '.join(_READERS)}"
        raise InputError(f"glue_dir {rule}, got {found}; add the split")
    try:
        table = _READERS[file.suffix](file, {name: pyarrow.string() for name in task.columns})
    except (pyarrow.ArrowException, OSError) as error:
        rule, found = f"must be readable as {file.suffix}", first_line(error)
        raise InputError(f"{file} {rule}, got {found}; correct the file") from error
    names = table.column_names
    wanted = [*task.columns, *([] if split.startswith("test") else ["label"])]
    valid = all(names.count(name) == 1 for name in wanted)
    rule = f"must have the columns {', '.join(wanted)}"
    require(valid, str(file), rule, ", ".join(names), "rename them")
    require(table.num_rows > 0, str(file), "must hold at least one row", "none", "fill the split")
    kept = [name for name in (*task.columns, "label", "idx") if names.count(name) == 1]
    return table.select(kept).to_pydict()


def _read_jsonl(file: Path, types: dict[str, pyarrow.DataType]) -> pyarrow.Table:
    # without types, text that looks like a date would be read as one
    options = json.ParseOptions(explicit_schema=pyarrow.schema(types))
    return json.read_json(file, parse_options=options)


def _read_tsv(file: Path, types: dict[str, pyarrow.DataType]) -> pyarrow.Table:
    # in GLUE's files quotes are text, and so are NA, null and numbers
    parse = csv.ParseOptions(delimiter="\t", quote_char=False)
    convert = csv.ConvertOptions(column_types=types)
    return csv.read_csv(file, parse_options=parse, convert_options=convert)


_READERS: dict[str, Callable[[Path, dict], pyarrow.Table]] = {
    ".parquet": lambda file, types: parquet.read_table(file),
    ".jsonl": _read_jsonl,
    ".tsv": _read_tsv,
}
