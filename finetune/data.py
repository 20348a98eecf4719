"""From the texts of a task to batches: tokenized once, bucketed by length.

Tokens are cached under a hash of the texts and the tokenizer, so that all runs of a grid share
them. The order of examples is a pure function of (seed, epoch), for any number of processes.

Shapes: N examples, K texts of an example (2 where pairs are encoded separately, else 1), B batch, L
tokens of the longest text of a batch, T tokens of a split.
"""

import functools
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save
from torch import Tensor

from finetune.task_data import Columns
from finetune.tasks import Task
from train.atomic_dir import report_full_disk
from train.data import vocabulary
from train.data.stateless_rng import permute
from train.loop.language_model import check_length
from train.settings import InputError

Rows = NDArray[np.int64]
"""Indices of rows of a split."""
ROWS_PER_CALL = 1024
"""Rows per call of the tokenizer, whose result takes 240 bytes a token."""
BUCKET_BATCHES = 32
"""Batches whose examples are sorted together: 1 % of the tokens are padding at length 512."""


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

    def micro_batches(self, rows: Rows, tokens: int, processes: int) -> list[Rows]:
        """Split rows [B] so that each process has at most `tokens` padded tokens, or one row."""
        row_tokens = self.text_lengths.shape[1] * int(self.lengths[rows].max())
        size = processes * max(1, tokens // row_tokens)
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
    pair_encoding: str = "joint",
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
    key = hashlib.sha256(repr((identify_tokenizer(tokenizer), length, shape)).encode())
    for column in texts:
        key.update("\0".join([*column, ""]).encode(errors="surrogatepass"))
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
    if len(tokenizer) > config.vocab_size:
        raise InputError(
            f"tokenizer must have at most the model's {config.vocab_size} entries, "
            f"got {len(tokenizer)}; take the tokenizer the model was trained with"
        )
    if tokenizer.pad_token_id is None:
        raise InputError(
            "tokenizer must have a padding token, got none; set pad_token in its folder"
        )
