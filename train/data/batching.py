"""Step 4 of the data path: documents cut into sequences, put in order and collected into batches.

Everything is a pure function of settings and step (docs/design/determinism.md), whatever the number
of processes, so that the state of the loader is one integer. A batch has one of two layouts, with
the same sequences and masks: padded rows, or, for attention kernels that take `cu_seq_lens_q`, one
packed row without padding.

Three numbers of a sequence: `sequence_id` is its place in the text, `index_in_epoch` that in the
random permutation of an epoch, and `sample_index` counts the sequences of the run as they come.

Shapes: B sequences, L tokens of the longest, T tokens of all sequences of a packed row.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from train.data import stateless_rng
from train.data.corpus import TokenStore
from train.data.masking import IGNORE_INDEX, mask_tokens
from train.data.vocabulary import Vocab
from train.settings import InputError

Indices = NDArray[np.int64]

WINDOW = 2048
"""Sequences that are sorted by length together, as the mega-batches of transformers' Trainer with
`group_by_length` are; more would save hardly any padding."""

MIN_BUCKET = 8
"""Least number of sequences in a bucket, in which sequences of similar length stay together."""

BUCKETS_PER_STEP = 4
"""A step of `batch_size` sequences has buckets of at least a quarter of them: it holds several
lengths, and micro-batches of up to a quarter hold one, with hardly any padding."""

SPECIALS_PER_SEQUENCE = 2
"""[CLS] and [SEP] of a sequence."""


class SequenceIndex:
    """Documents of a store, cut into sequences of at most `length` tokens.

    A sequence does not cross the end of a document. The sequence of a given number is found by
    bisection in a table of documents.

    Args:
        store: The tokens.
        length: Longest sequence in tokens, [CLS] and [SEP] included.

    Attributes:
        mean_length: Mean tokens per sequence, special tokens included.
    """

    def __init__(self, store: TokenStore, length: int) -> None:
        self.store = store
        self.length = length
        self._content = length - SPECIALS_PER_SEQUENCE
        starts = np.concatenate([[0], store.document_ends])  # the last is the end of the text
        counts = -(-np.diff(starts) // self._content)  # sequences of each document, rounded up
        self._first_ids = np.concatenate([[0], np.cumsum(counts)])  # [documents + 1]
        self.mean_length = SPECIALS_PER_SEQUENCE + float(starts[-1] / len(self))

    def __len__(self) -> int:
        return int(self._first_ids[-1])

    def locate(self, sequence_ids: Indices) -> tuple[Indices, Indices]:
        """Return start in the tokens of the store and number of tokens of each sequence, [n]."""
        document = np.searchsorted(self._first_ids, sequence_ids, side="right") - 1
        ends = self.store.document_ends
        start = np.where(document > 0, ends[document - 1], 0)
        start += (sequence_ids - self._first_ids[document]) * self._content
        return start, np.minimum(self._content, ends[document] - start)


def training_order(
    sequences: SequenceIndex, sample_index: Indices, seed: int, bucket_size: int = MIN_BUCKET
) -> tuple[Indices, Indices]:
    """Return the sequences [n] at `sample_index` [n] of the run, and the epoch of each [n].

    Samples e*N to (e+1)*N - 1 are epoch e: a random permutation of the N sequences. In each window
    of the permutation sequences are sorted by length and cut into buckets of `bucket_size`, and the
    buckets are shuffled.
    """
    epochs, index_in_epoch = np.divmod(sample_index, len(sequences))
    windows, index_in_window = np.divmod(index_in_epoch, WINDOW)
    sequence_ids = np.empty_like(sample_index)
    for epoch, window in {(int(e), int(w)) for e, w in zip(epochs, windows)}:
        chosen = (epochs == epoch) & (windows == window)
        order = _window_order(sequences, epoch, window, seed, bucket_size)
        sequence_ids[chosen] = order[index_in_window[chosen]]
    return sequence_ids, epochs


def _window_order(
    sequences: SequenceIndex, epoch: int, window: int, seed: int, bucket_size: int
) -> Indices:
    size = len(sequences)
    index_in_epoch = np.arange(window * WINDOW, min((window + 1) * WINDOW, size))
    sequence_ids = stateless_rng.permute(index_in_epoch, size, seed, epoch)
    by_length = np.argsort(sequences.locate(sequence_ids)[1], kind="stable")
    buckets = [by_length[i : i + bucket_size] for i in range(0, len(by_length), bucket_size)]
    keys = stateless_rng.random_bits(seed, epoch, window, np.arange(len(buckets)))
    return sequence_ids[np.concatenate([buckets[i] for i in np.argsort(keys)])]


@dataclass(frozen=True)
class BatchFormat:
    """What is predicted in a batch, and how its sequences are laid out.

    Attributes:
        vocab: The tokenizer's ids.
        mask_rate: Share of tokens to choose and predict.
        seed: Seed of the masks and of the order of training; each stage has another.
        causal: Predict every token of the text from the tokens before it and mask nothing, whatever
            `mask_rate` is: for a decoder.
        whole_word: Whether whole words are chosen instead of single tokens.
        packed: Whether a batch is one packed row instead of rows padded to the longest.
        constant_shapes: Whether `label_indices` and `labels` are padded to a multiple of
            `label_capacity`, with 0 and `IGNORE_INDEX`: one shape for compilation, the same masks.
    """

    vocab: Vocab
    mask_rate: float
    seed: int
    causal: bool = False
    whole_word: bool = False
    packed: bool = False
    constant_shapes: bool = False


def make_batch(
    sequences: SequenceIndex, sequence_ids: Indices, epochs: Indices, batch_format: BatchFormat
) -> dict[str, Any]:
    """Make the inputs and labels of sequences [B].

    `epochs` [B] tells how often each was seen before: in every epoch it is masked differently.

    Returns:
        input_ids: [B, L] or packed [1, T], int64, corrupted unless causal.
        attention_mask: [B, L] int64, 0 on padding; or for a packed row the entries of
            `packed_layout`.
        label_indices: [n] int64, positions in the flattened input_ids that predict the labels:
            those of the labelled tokens, or if causal those before the labels.
        labels: [n] int64, ids of the original tokens.
    """
    vocab, rate, seed = batch_format.vocab, batch_format.mask_rate, batch_format.seed
    ids, lengths = _read_sequences(sequences, sequence_ids, vocab)
    column = np.arange(ids.shape[1])
    is_token = column < lengths[:, None]
    if batch_format.causal:
        # each predicts the next token, but not [SEP]
        inputs, chosen = ids, column < lengths[:, None] - 2
        labels = np.roll(ids, -1, axis=1)[chosen]
    else:
        whole_word = batch_format.whole_word
        inputs, chosen = mask_tokens(
            ids, sequence_ids, epochs, vocab=vocab, mask_rate=rate, seed=seed, whole_word=whole_word
        )
        labels = ids[chosen]
    layout: dict[str, Any] = {"attention_mask": torch.from_numpy(is_token.astype(np.int64))}
    if batch_format.packed:
        layout = packed_layout(lengths)
        inputs, chosen = inputs[is_token][None], chosen[is_token]
    label_indices = np.flatnonzero(chosen)
    if batch_format.constant_shapes:
        tokens = len(sequence_ids) * sequences.length
        multiple = tokens if batch_format.causal else label_capacity(tokens, rate)
        count = max(1, math.ceil(len(label_indices) / multiple)) * multiple
        padding = (0, count - len(label_indices))
        label_indices = np.pad(label_indices, padding)
        labels = np.pad(labels, padding, constant_values=IGNORE_INDEX)
    tensors = {"input_ids": inputs, "label_indices": label_indices, "labels": labels}
    return layout | {name: torch.from_numpy(values) for name, values in tensors.items()}


def _read_sequences(
    sequences: SequenceIndex, sequence_ids: Indices, vocab: Vocab
) -> tuple[Indices, Indices]:
    """Read sequences with special tokens and padding, [B, L], and their lengths, [B]."""
    start, size = (values.tolist() for values in sequences.locate(sequence_ids))
    lengths = np.array(size) + SPECIALS_PER_SEQUENCE
    ids = np.full((len(lengths), int(lengths.max())), vocab.pad_id, np.int64)
    ids[:, 0] = vocab.cls_id
    for row, (first, count) in enumerate(zip(start, size)):
        ids[row, 1 : count + 1] = sequences.store.read(first, count)
        ids[row, count + 1] = vocab.sep_id
    return ids, lengths


def packed_layout(lengths: Indices) -> dict[str, Any]:
    """Describe sequences of these lengths [B] in one packed row.

    Returns:
        position_ids: [1, T] int64, from 0 for each sequence.
        cu_seq_lens_q: [B + 1] int32, 0 and the end of each sequence.
        max_length_q: int, tokens of the longest.
    """
    position_ids = np.concatenate([np.arange(length) for length in lengths])
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    return {
        "position_ids": torch.from_numpy(position_ids)[None],
        "cu_seq_lens_q": torch.from_numpy(cu_seqlens),
        "max_length_q": int(lengths.max()),
    }


def label_capacity(tokens: int, mask_rate: float) -> int:
    """Return a number of labels that masking `tokens` tokens hardly ever exceeds.

    It is the mean plus 6 standard deviations for independently chosen tokens, rounded up to a
    multiple of 8. A batch with more, as whole words can have, is padded to the next multiple:
    another compilation, never an error.
    """
    count = tokens * mask_rate + 6 * math.sqrt(tokens * mask_rate * (1 - mask_rate))
    return 8 * math.ceil(count / 8)


def check_batch_size(batch_size: int, micro_batch: int, processes: int) -> None:
    """Check that a batch divides evenly into micro-batches of all processes."""
    multiple = micro_batch * processes
    if batch_size % multiple != 0:
        raise InputError(
            "optim.batch_size must be a multiple of optim.micro_batch times the processes "
            f"({micro_batch} x {processes} = {multiple}), got {batch_size}; change either"
        )


@dataclass
class StepDataset(Dataset):
    """Micro-batches of one process in a stage of `steps` optimizer steps, by step of the stage.

    Each stage has its own sequence length, batch size or text, as in the six stages of the paper's
    Chinese model. A run without stages is one stage. `batch_size` counts the sequences of a step
    over all processes, `micro_batch` those of a forward pass.
    """

    sequences: SequenceIndex
    batch_format: BatchFormat
    steps: int
    batch_size: int
    micro_batch: int
    processes: int = 1
    rank: int = 0

    def __len__(self) -> int:
        return self.steps

    def micro_batch_sequences(self, step: int) -> list[tuple[Indices, Indices]]:
        """Return sequences and epochs of each micro-batch of this process."""
        sample_index = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        bucket_size = max(MIN_BUCKET, self.batch_size // BUCKETS_PER_STEP)
        sequence_ids, epochs = training_order(
            self.sequences, sample_index, self.batch_format.seed, bucket_size
        )
        by_length = np.argsort(self.sequences.locate(sequence_ids)[1], kind="stable")
        # processes get neighbours in length at the same time: equal work, no waiting
        rows = by_length.reshape(-1, self.micro_batch)[self.rank :: self.processes]
        return [(sequence_ids[row], epochs[row]) for row in rows]

    def __getitem__(self, step: int) -> list[dict[str, Any]]:
        return [
            make_batch(self.sequences, sequence_ids, epochs, self.batch_format)
            for sequence_ids, epochs in self.micro_batch_sequences(step)
        ]
