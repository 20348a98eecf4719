"""A task's files to batches: read, checked, tokenised once, bucketed by length.

Local files are read with pyarrow, which copies nothing into a cache; the `datasets` library serves
the hub. Tokens are kept on disk under a name made of the texts and the tokenizer, so that all runs
of a grid, in whatever process, share them. The order of examples is a pure function of (seed,
epoch), for any number of processes.

Legend: N examples, B batch, L tokens of the batch's longest example, T tokens of a split.
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
from train.data import vocabulary
from train.data.stateless_rng import permuted
from train.loop.atomic_dir import report_full_disk
from train.settings import InputError, reason, require

Rows = NDArray[np.int64]
ROWS_AT_ONCE = 8192
"""Rows that are tokenised in one call: what it returns takes 240 bytes a token."""
WINDOW = 32
"""Batches whose examples are sorted together: 99 % of tokens are real (measured on text at 512)."""


@dataclass(frozen=True)
class Examples:
    """The tokenised rows of one split.

    Attributes:
        inputs: Name of a model input -> its integers of all examples, one after the other, [T];
            no attention mask.
        lengths: Tokens an example, [N].
        labels: Class ids, int64, or values, float32; -1 where the file has none; [N].
        padding: Value that fills each input up.
    """

    inputs: dict[str, NDArray[np.int32]]
    lengths: Rows
    labels: NDArray
    padding: dict[str, int]

    @cached_property
    def starts(self) -> Rows:
        """Where each example begins, [N]."""
        return np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: Rows, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Rows [B] as model inputs [B, L], padded to the longest of them, with `labels` [B]."""
        across = np.arange(self.lengths[rows].max())
        real = across < self.lengths[rows, None]  # [B, L]
        places = np.where(real, self.starts[rows, None] + across, 0)
        arrays = {"attention_mask": real.astype(np.int64), "labels": self.labels[rows]}
        for name, values in self.inputs.items():
            arrays[name] = np.where(real, values[places], self.padding[name]).astype(np.int64)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if torch.device(device).type != "cuda":
            return {name: tensor.to(device) for name, tensor in tensors.items()}
        # from other memory the host would wait for each copy
        return {name: x.pin_memory().to(device, non_blocking=True) for name, x in tensors.items()}


def load_examples(
    task: Task, split: str, glue_dir: str | None, tokenizer: Any, length: int, cache: str
) -> Examples:
    """Read, check and tokenise one split.

    Args:
        task: What the columns and labels must be.
        split: One of the task's splits; labels of a test split may be missing.
        glue_dir: Folder of task folders; None means `nyu-mll/glue` on the hub.
        tokenizer: The model's.
        length: Longest input in tokens.
        cache: Folder where tokens are kept.

    Raises:
        InputError: The data are missing or not what the task says.
    """
    columns = read_split_columns(task, split, glue_dir)
    labels = columns.pop("label")
    tokens = tokenised(list(columns.values()), tokenizer, length, cache)
    lengths = tokens.pop("lengths").astype(np.int64)
    padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    return Examples(tokens, lengths, labels, {name: padding.get(name, 0) for name in tokens})


def read_split_columns(task: Task, split: str, glue_dir: str | None) -> dict[str, Any]:
    """The text columns of a split, lists of N strings, and `label`, an array [N], all checked.

    Raises:
        InputError: The data are missing or not what the task says.
    """
    columns = _from_hub(task, split) if glue_dir is None else _from_folder(task, split, glue_dir)
    where, known = f"{task.name}/{split}", not split.startswith("test")
    # blank text is real where nobody can mend it: in test splits, and beside the other text of a
    # pair, as in two rows of QQP's training split
    rows = zip(*(columns[name] for name in task.columns))
    fits = [not known or any(str(value).strip() for value in row) for row in rows]
    for name in task.columns:
        text = columns[name]
        bad = (row for row, v in enumerate(text) if not (isinstance(v, str) and fits[row]))
        wrong = next(bad, None)
        if wrong is not None:
            found = f"{text[wrong]!r} in row {wrong}"
            raise InputError(f"column {name} of {where} must hold text, got {found}; mend the file")
    index = columns.get("idx", [])
    first: dict[str, int] = {}  # by repr, for a file may hold lists
    twice = next((r for r, i in enumerate(index) if first.setdefault(repr(i), r) != r), None)
    if twice is not None:
        found = f"{index[twice]} in rows {first[repr(index[twice])]} and {twice}"
        raise InputError(f"idx of {where} must be unique, got {found}; leave out the copies")
    apart = next((row for row, i in enumerate(index) if i != row), None)
    if apart is not None and not known:  # the test server reads predictions by idx
        found = f"{index[apart]} in row {apart}"
        raise InputError(f"idx of {where} must count from 0, got {found}; sort the rows by it")
    texts = {name: columns[name] for name in task.columns}
    count = len(columns[task.columns[0]])
    labels = columns.get("label", [-1] * count)
    return {**texts, "label": _checked_labels(labels, task, where, known)}


def tokenised(
    texts: list[list[str]], tokenizer: Any, length: int, cache: str
) -> dict[str, NDArray[np.int32]]:
    """The tokens of N rows of one or two texts: from the cache, or made and kept there.

    Returns:
        Each model input, [T], and `lengths`, [N].
    """
    name = hashlib.sha256(repr((tokenizer_identity(tokenizer), length)).encode())
    for column in texts:
        name.update("\0".join([*column, ""]).encode(errors="surrogatepass"))
    file = Path(cache) / f"glue-{name.hexdigest()[:20]}.safetensors"
    if not file.exists():
        parts: dict[str, list[NDArray[np.int32]]] = defaultdict(list)
        for start in range(0, len(texts[0]), ROWS_AT_ONCE):
            some = [column[start : start + ROWS_AT_ONCE] for column in texts]
            encoded = tokenizer(*some, truncation="longest_first", max_length=length)
            for key in encoded:
                if key != "attention_mask":
                    parts[key] += [np.asarray(row, np.int32) for row in encoded[key]]
        arrays = {key: np.concatenate(rows) for key, rows in parts.items()}
        arrays["lengths"] = np.array([len(row) for row in parts["input_ids"]], np.int32)
        with report_full_disk(Path(cache), "cache"):
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(f".{os.getpid()}")  # several processes may make it
            unfinished.write_bytes(save(arrays))
            unfinished.replace(file)
    return load_file(file)


def tokenizer_identity(tokenizer: Any) -> str:
    """What decides the tokens a tokenizer makes: its class, options and tables."""
    options = tokenizer.truncation_side, *tokenizer.model_input_names
    return " ".join((type(tokenizer).__name__, *options, vocabulary.rules_of(tokenizer)))


def epoch_batches(lengths: Rows, batch_size: int, seed: int, epoch: int) -> Iterator[Rows]:
    """The batches of an epoch: every row once, rows of like length together, in shuffled order.

    Rows are permuted, sorted by length within windows of `WINDOW` batches, cut, and the batches
    permuted in their turn. The last batch cut may be smaller; it is kept.

    Args:
        lengths: Tokens an example, [N].
        batch_size: Examples of a full batch, B.
        seed: Names the order, with the epoch.
        epoch: Counts from 0.

    Yields:
        Row numbers, [B].
    """
    rows = permuted(np.arange(len(lengths)), len(lengths), seed, epoch)
    for start in range(0, len(rows), WINDOW * batch_size):
        window = rows[start : start + WINDOW * batch_size]
        rows[start : start + WINDOW * batch_size] = window[
            np.argsort(lengths[window], kind="stable")
        ]
    count = -(-len(rows) // batch_size)
    for index in permuted(np.arange(count), count, seed, epoch, 1):
        yield rows[index * batch_size : (index + 1) * batch_size]


def require_fit(config: Any, tokenizer: Any, length: int) -> None:
    """Refuse a length or a tokenizer for which the model has no embeddings.

    A configuration whose class says `has_position_limit = False` has no table to run out of.

    Raises:
        InputError: One of them does not fit.
    """
    positions = getattr(config, "max_position_embeddings", None)
    limited = getattr(config, "has_position_limit", True)
    require(
        positions is None or not limited or length <= positions,
        "length",
        f"must be at most the model's {positions} positions",
        length,
        "shorten it or take a RoFormer, which has no limit",
    )
    require(
        len(tokenizer) <= config.vocab_size,
        "tokenizer",
        f"must have at most the model's {config.vocab_size} entries",
        len(tokenizer),
        "take the tokenizer the model was trained with",
    )
    padded = tokenizer.pad_token_id is not None
    require(padded, "tokenizer", "must have a padding token", "none", "set pad_token in its folder")


def _from_hub(task: Task, split: str) -> dict[str, list]:
    try:
        table = datasets.load_dataset(HUB_DATA, task.name, split=split)
    except (OSError, ValueError) as error:
        raise InputError(
            "glue_dir must name a folder where the hub cannot be read, got null "
            f"({reason(error)}); give --glue_dir FOLDER"
        ) from error
    return table.to_dict()


def find_file(task: Task, split: str, glue_dir: str) -> Path | None:
    """The file of a split, or None."""
    files = (Path(glue_dir) / task.name / f"{split}{suffix}" for suffix in _READERS)
    return next((path for path in files if path.is_file()), None)


def data_of(task: Task, glue_dir: str | None) -> str | None:
    """What a task's labelled splits hold, in 16 characters; None for the hub's."""
    if glue_dir is None:
        return None
    files = (find_file(task, split, glue_dir) for split in ("train", *task.validation_splits))
    return hash_files([file for file in files if file is not None])


def _from_folder(task: Task, split: str, glue_dir: str) -> dict[str, list]:
    folder = Path(glue_dir) / task.name
    if not folder.is_dir():
        raise InputError(f"glue_dir must hold a folder {task.name}, got {glue_dir}; check the path")
    file = find_file(task, split, glue_dir)
    if file is None:
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "an empty folder"
        raise InputError(
            f"glue_dir must hold {task.name}/{split} as one of {', '.join(_READERS)}, "
            f"got {found}; add the split"
        )
    try:
        table = _READERS[file.suffix](file, {name: pyarrow.string() for name in task.columns})
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            f"{file} must be readable as {file.suffix}, got {reason(error)}; mend the file"
        ) from error
    return _checked_columns(table, task, file)


def _checked_columns(table: pyarrow.Table, task: Task, file: Path) -> dict[str, list]:
    labelled = ["label"] * (not file.stem.startswith("test"))
    wanted = [*task.columns, *labelled]
    found = table.column_names
    present = all(found.count(name) == 1 for name in wanted)
    require(
        present,
        str(file),
        f"must have the columns {', '.join(wanted)}",
        ", ".join(found),
        "rename them",
    )
    require(table.num_rows > 0, str(file), "must hold at least one row", "none", "fill the split")
    kept = [name for name in (*task.columns, "label", "idx") if found.count(name) == 1]
    return table.select(kept).to_pydict()


def _checked_labels(values: list, task: Task, where: str, known: bool) -> NDArray:
    """Labels as the loss wants them: int64 class ids or float32 values, [N]; -1 if not known."""
    top = 5 if task.labels is None else len(task.labels) - 1
    rule = (
        f"must be numbers from 0 to {top}"
        if task.labels is None
        else f"must be ids from 0 to {top}"
    )
    labels = np.array([_as_number(value) for value in values])
    if not known:
        labels = np.where(np.isnan(labels), -1, labels)
    lowest = 0 if known else -1
    good = (labels >= lowest) & (labels <= top)  # false for a missing label, which is nan
    if task.labels is not None:
        good &= labels == np.floor(labels)
    wrong = int(good.argmin())
    require(
        bool(good.all()),
        f"label of {where}",
        rule,
        f"{values[wrong]!r} in row {wrong}",
        "mend the file; finetune/tasks.py has the ids",
    )
    return labels.astype(np.float32 if task.labels is None else np.int64)


def _as_number(value: Any) -> float:
    """A label; nan where it is missing, infinite where it is none."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError):
        return math.inf


def _read_jsonl(file: Path, types: dict[str, pyarrow.DataType]) -> pyarrow.Table:
    # text that looks like a date would otherwise become one
    options = json.ParseOptions(explicit_schema=pyarrow.schema(types))
    return json.read_json(file, parse_options=options)


def _read_tsv(file: Path, types: dict[str, pyarrow.DataType]) -> pyarrow.Table:
    # GLUE's quotes are text, and so are NA, null and numbers
    parse = csv.ParseOptions(delimiter="\t", quote_char=False)
    return csv.read_csv(
        file, parse_options=parse, convert_options=csv.ConvertOptions(column_types=types)
    )


_READERS: dict[str, Callable[[Path, dict], pyarrow.Table]] = {
    ".parquet": lambda file, types: parquet.read_table(file),
    ".jsonl": _read_jsonl,
    ".tsv": _read_tsv,
}
