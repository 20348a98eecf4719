"""A task's files to batches: read, checked, tokenised once, bucketed by length.

Local files are read with pyarrow, which copies nothing into a cache; the `datasets` library serves
the hub. The order of examples is a pure function of (seed, epoch), for any number of processes.

Legend: N examples, B batch, L tokens of the batch's longest example.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import torch
from numpy.typing import NDArray
from pyarrow import csv, json, parquet
from torch import Tensor

from finetune.tasks import Task
from train.counter import permuted
from train.settings import InputError, require

Rows = NDArray[np.int64]
HUB_DATA = "nyu-mll/glue"
WINDOW = 32
"""Batches whose examples are sorted together: 99 % of tokens are real (measured on text at 512)."""


@dataclass(frozen=True)
class Examples:
    """The tokenised rows of one split.

    Attributes:
        inputs: Name of a model input -> one list of integers an example; no attention mask.
        labels: Class ids, int64, or values, float32; [N].
        lengths: Tokens an example, [N].
        padding: Value that fills each input up.
    """

    inputs: dict[str, list[list[int]]]
    labels: NDArray
    lengths: Rows
    padding: dict[str, int]

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Rows, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Rows [B] as model inputs [B, L], padded to the longest of them, with `labels` [B]."""
        real = np.arange(self.lengths[rows].max()) < self.lengths[rows, None]  # [B, L]
        arrays = {"attention_mask": real.astype(np.int64), "labels": self.labels[rows]}
        for name, values in self.inputs.items():
            arrays[name] = np.full(real.shape, self.padding[name], np.int64)
            arrays[name][real] = np.concatenate([values[row] for row in rows])
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def load_examples(
    task: Task, split: str, glue_dir: str | None, tokenizer: Any, length: int
) -> Examples:
    """Read, check and tokenise one split.

    Args:
        task: What the columns and labels must be.
        split: One of the task's splits with labels.
        glue_dir: Folder of task folders; None means `nyu-mll/glue` on the hub.
        tokenizer: The model's.
        length: Longest input in tokens.

    Raises:
        InputError: The data are missing or not what the task says.
    """
    columns = _from_hub(task, split) if glue_dir is None else _from_folder(task, split, glue_dir)
    where = f"{task.name}/{split}"
    labels = _checked_labels(columns["label"], task, where)
    texts = [columns[name] for name in task.columns]
    for name, text in zip(task.columns, texts):
        wrong = next((row for row, value in enumerate(text) if not isinstance(value, str)), None)
        if wrong is not None:
            found = f"{text[wrong]!r} in row {wrong}"
            raise InputError(f"column {name} of {where} must hold text, got {found}; mend the file")
    encoded = tokenizer(*texts, truncation="longest_first", max_length=length)
    inputs = {name: encoded[name] for name in encoded if name != "attention_mask"}
    padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    lengths = np.array([len(ids) for ids in inputs["input_ids"]], np.int64)
    return Examples(inputs, labels, lengths, {name: padding.get(name, 0) for name in inputs})


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
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"glue_dir must name a folder where the hub cannot be read, got null ({reason}); "
            "give --glue_dir FOLDER"
        ) from error
    return table.to_dict()


def _from_folder(task: Task, split: str, glue_dir: str) -> dict[str, list]:
    folder = Path(glue_dir) / task.name
    if not folder.is_dir():
        raise InputError(f"glue_dir must hold a folder {task.name}, got {glue_dir}; check the path")
    files = [folder / f"{split}{suffix}" for suffix in _READERS]
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "an empty folder"
        raise InputError(
            f"glue_dir must hold {task.name}/{split} as one of {', '.join(_READERS)}, "
            f"got {found}; add the split"
        )
    try:
        table = _READERS[file.suffix](file, {name: pyarrow.string() for name in task.columns})
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{file} must be readable as {file.suffix}, got {reason}; mend the file"
        ) from error
    return _checked_columns(table, task, file)


def _checked_columns(table: pyarrow.Table, task: Task, file: Path) -> dict[str, list]:
    wanted = [*task.columns, "label"]
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
    return table.select(wanted).to_pydict()


def _checked_labels(values: list, task: Task, where: str) -> NDArray:
    """Labels as the loss wants them: int64 class ids or float32 values, [N]."""
    top = 5 if task.labels is None else len(task.labels) - 1
    rule = (
        f"must be numbers from 0 to {top}"
        if task.labels is None
        else f"must be ids from 0 to {top}"
    )
    try:
        labels = np.array(values, np.float64)
    except (TypeError, ValueError):
        raise InputError(
            f"label of {where} {rule}, got {values[0]!r}; the ids stand in finetune/tasks.py"
        ) from None
    good = (labels >= 0) & (labels <= top)  # false for a missing label, which is nan
    if task.labels is not None:
        good &= labels == np.floor(labels)
    wrong = int(good.argmin())
    require(
        bool(good.all()),
        f"label of {where}",
        rule,
        f"{values[wrong]!r} in row {wrong}",
        "mend the file",
    )
    return labels.astype(np.float32 if task.labels is None else np.int64)


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
