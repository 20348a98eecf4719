"""Token ids to batches: documents cut at the length, ordered, grouped so that little is padding.

Everything is a pure function of (settings, seed, step), the same for every number of processes: the
loader's whole state is the step. A batch has one of two layouts, of the same sequences and masks:
padded rows, or for a kernel that knows borders one packed row. Legend: B batch, L tokens, T tokens
of all sequences in a packed row.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from train.data import stateless_rng
from train.data.masking import Vocab, mask_tokens
from train.data.token_store import TokenStore
from train.settings import require

WINDOW = 2048
"""Sequences that are sorted by length together; more would save hardly any padding."""

GROUP = 8
"""Fewest sequences of like length that stay neighbours."""

GROUPS_A_STEP = 4
"""Groups that a step mixes when it holds enough, so that it sees several lengths; micro-batches of
at most that share of a step have hardly any padding."""

BLOCK = 16
"""Documents a place in memory stands for; the others are counted from there when asked for."""

IGNORE_INDEX = -100
"""Target of a place that only fills up a fixed size: no loss, no guess."""


class SequenceIndex:
    """Documents of a store cut into pieces of at most `length` tokens, special tokens included.

    A piece never crosses a document's end. It is found by bisection among blocks of documents, half
    a byte of memory a document, and by counting inside the block: the ends stay on disk.

    Attributes:
        sizes: Pieces of each part that is weighed on its own, [parts]; their sum is the length.
        draws: How many of them an epoch takes, [parts]; the same numbers without weights.
    """

    def __init__(self, store: TokenStore, length: int, weights: list[float] | None = None) -> None:
        self.store = store
        self.length = length
        self.content = length - 2  # [CLS] and [SEP] come on top
        pieces = [np.zeros(1, np.int64)]
        for first in range(0, len(store.ends), 2**16 * BLOCK):  # a bounded part at a time
            last = min(first + 2**16 * BLOCK, len(store.ends))
            number = self._pieces(*self._documents(np.arange(first, last)))
            pieces.append(np.add.reduceat(number, np.arange(0, len(number), BLOCK)))
        self.first_piece = np.cumsum(np.concatenate(pieces))
        borders = np.cumsum((0, *store.parts) if weights else (0, len(store.ends)))
        self.sizes = np.diff([self._pieces_before(int(document)) for document in borders])
        factors = np.array(weights or [1.0])
        self.draws = np.maximum(np.rint(self.sizes * factors), self.sizes > 0).astype(np.int64)
        tokens = np.diff(self._documents(borders)[0])
        self._mean_content = tokens / np.maximum(self.sizes, 1) @ self.draws / self.epoch_size

    def __len__(self) -> int:
        return int(self.sizes.sum())

    @property
    def epoch_size(self) -> int:
        """Sequences an epoch takes."""
        return int(self.draws.sum())

    @property
    def mean_length(self) -> float:
        """Mean tokens of a sequence of an epoch, [CLS] and [SEP] included."""
        return 2 + float(self._mean_content)

    def spans(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start in the tokens of the store and number of tokens of each piece."""
        block = np.searchsorted(self.first_piece, index, side="right") - 1
        start, end = self._documents(block[:, None] * BLOCK + np.arange(BLOCK))  # [n, BLOCK]
        after = np.cumsum(self._pieces(start, end), axis=1)  # pieces up to each document's end
        inside = index - self.first_piece[block]
        row, column = np.arange(len(index)), (after <= inside[:, None]).sum(axis=1)
        start, end = start[row, column], end[row, column]
        start += (inside - after[row, column] + self._pieces(start, end)) * self.content
        return start, np.minimum(self.content, end - start)

    def sample_epoch(
        self, entry: NDArray[np.int64], epoch: int, seed: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Pieces that an epoch takes, and how often each was taken before.

        A part is gone through again and again, `draws` pieces an epoch, in one order that mixes its
        documents: half of a part is followed by its other half.

        Args:
            entry: [n] numbers in [0, per_epoch).
            epoch: Epochs before this one.
            seed: The run's.
        """
        if np.array_equal(self.draws, self.sizes):
            return entry, np.full_like(entry, epoch)
        part = np.searchsorted(np.cumsum(self.draws), entry, side="right")
        piece, visit = np.empty_like(entry), np.empty_like(entry)
        for number in np.unique(part).tolist():
            here, size = part == number, int(self.sizes[number])
            count = epoch * self.draws[number] + entry[here] - self.draws[:number].sum()
            visit[here] = count // size
            turn = stateless_rng.permute(count % size, size, seed, number)
            piece[here] = self.sizes[:number].sum() + turn
        return piece, visit

    def _documents(self, number: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of documents in the tokens of the store; empty beyond the last."""
        ends = self.store.ends
        end = ends[np.minimum(number, len(ends) - 1)]
        before = ends[np.minimum(number, len(ends)) - 1]
        return np.where(number > 0, before, 0), end

    def _pieces(self, start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
        return -((start - end) // self.content)

    def _pieces_before(self, document: int) -> int:
        first = document // BLOCK * BLOCK
        inside = self._pieces(*self._documents(np.arange(first, document))).sum()
        return int(self.first_piece[document // BLOCK] + inside)


def training_order(
    sequences: SequenceIndex, place: NDArray[np.int64], seed: int, group: int = GROUP
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which sequence stands at each place of the endless training order.

    Epoch e fills places e*N .. (e+1)*N - 1, N = `epoch_size`; without weights, with every sequence
    once. Inside a window of the epoch's permutation, sequences are sorted by length and groups of
    `group` neighbours are shuffled.

    Returns:
        The sequences [n], and how often each was seen before, [n].
    """
    epoch, inside = np.divmod(place, sequences.epoch_size)
    index, visit = np.empty_like(place), np.empty_like(place)
    for key in {(int(e), int(w)) for e, w in zip(epoch, inside // WINDOW)}:
        here = (epoch == key[0]) & (inside // WINDOW == key[1])
        order = _window(sequences, *key, seed, group)
        index[here], visit[here] = (x[inside[here] % WINDOW] for x in order)
    return index, visit


def _window(
    sequences: SequenceIndex, epoch: int, window: int, seed: int, group: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    number = sequences.epoch_size
    places = np.arange(window * WINDOW, min((window + 1) * WINDOW, number))
    entry = stateless_rng.permute(places, number, seed, epoch)
    index, visit = sequences.sample_epoch(entry, epoch, seed)
    by_length = np.argsort(sequences.spans(index)[1], kind="stable")
    groups = [by_length[i : i + group] for i in range(0, len(by_length), group)]
    shuffled = np.argsort(stateless_rng.random_bits(seed, epoch, window, np.arange(len(groups))))
    order = np.concatenate([groups[i] for i in shuffled])
    return index[order], visit[order]


def make_batch(
    sequences: SequenceIndex,
    index: NDArray[np.int64],
    visit: NDArray[np.int64],
    vocab: Vocab,
    mask_rate: float | None,
    seed: int,
    packed: bool = False,
    pad_predictions_to: int | None = None,
) -> dict[str, Any]:
    """The given sequences, and what is to be predicted of them.

    Args:
        sequences: Where they come from.
        index: [B] which.
        visit: [B] how often each was seen before: every time it is masked anew.
        vocab: The tokenizer's ids.
        mask_rate: Share of tokens to mask and predict; None predicts every token of the text from
            those before it, and corrupts nothing.
        seed: The run's.
        packed: All in one row instead of rows padded to the longest.
        pad_predictions_to: Pad `label_positions` and `labels` to a multiple of this, with 0 and
            `IGNORE_INDEX`, so that a compiled step meets one shape. The masks are the same.

    Returns:
        input_ids: [B, L] or packed [1, T], int64, corrupted.
        attention_mask: [B, L] int64, 0 on padding; when packed instead
        position_ids: [1, T] int64, from 0 for each sequence,
        cu_seq_lens_q: [B + 1] int32, 0 and the ends of sequences, and
        max_length_q: int, tokens of the longest.
        label_positions: [n] int64, positions in the flattened input_ids that predict the labels:
            those of the masked tokens, or without masks those before the labels.
        labels: [n] int64, their original ids.
    """
    start, size = sequences.spans(index)
    L = int(size.max()) + 2  # noqa: N806
    ids = np.full((len(index), L), vocab.pad_id, np.int64)
    for row, (a, n) in enumerate(zip(start.tolist(), size.tolist())):
        ids[row, 0], ids[row, n + 1] = vocab.cls_id, vocab.sep_id
        ids[row, 1 : n + 1] = sequences.store.read(a, n)
    real = np.arange(L) < size[:, None] + 2
    if mask_rate is None:
        corrupted, chosen = ids, np.arange(L) < size[:, None]  # [CLS] comes before the first token
        targets = np.roll(ids, -1, axis=1)[chosen]
    else:
        corrupted, chosen = mask_tokens(ids, index, visit, vocab, mask_rate, seed)
        targets = ids[chosen]
    layout: dict[str, Any] = {"attention_mask": torch.from_numpy(real.astype(np.int64))}
    if packed:
        layout = packed_layout(size + 2)
        corrupted, chosen = corrupted[real][None], chosen[real]
    places = np.flatnonzero(chosen)
    if pad_predictions_to is not None:
        padded = max(1, math.ceil(len(places) / pad_predictions_to)) * pad_predictions_to
        room = padded - len(places)
        places = np.pad(places, (0, room))
        targets = np.pad(targets, (0, room), constant_values=IGNORE_INDEX)
    return layout | {
        "input_ids": torch.from_numpy(corrupted),
        "label_positions": torch.from_numpy(places),
        "labels": torch.from_numpy(targets),
    }


def packed_layout(lengths: NDArray[np.int64]) -> dict[str, Any]:
    """What a kernel must know of sequences of these lengths in one row."""
    positions = np.concatenate([np.arange(length) for length in lengths])
    borders = np.cumsum([0, *lengths]).astype(np.int32)
    return {
        "position_ids": torch.from_numpy(positions)[None],
        "cu_seq_lens_q": torch.from_numpy(borders),
        "max_length_q": int(lengths.max()),
    }


def max_predictions(tokens: int, mask_rate: float | None) -> int:
    """Predicted tokens that so many tokens hardly ever exceed: 6 standard deviations, in eights."""
    if mask_rate is None:
        return tokens
    most = tokens * mask_rate + 6 * math.sqrt(tokens * mask_rate * (1 - mask_rate))
    return 8 * math.ceil(most / 8)


def check_batch_size(batch_size: int, micro_batch: int, processes: int) -> None:
    """Refuse a batch that cannot be shared out evenly.

    Raises:
        InputError: It is no multiple of what all processes take at once.
    """
    share = micro_batch * processes
    rule = "must be a multiple of optim.micro_batch times the processes"
    rule += f" ({micro_batch} x {processes} = {share})"
    require(batch_size % share == 0, "optim.batch_size", rule, batch_size, "change either")


class StepDataset(Dataset):
    """The micro-batches of one process, by optimiser step.

    Args:
        sequences: The training text.
        vocab: The tokenizer's ids.
        batch_size: Sequences a step, over all processes.
        micro_batch: Sequences a process takes at once.
        mask_rate: As in `make_batch`.
        seed: The run's.
        processes: How many share the work.
        rank: Which of them this is.
        packed: The layout, as in `make_batch`.
        pad_predictions_to: As in `make_batch`.
    """

    def __init__(
        self,
        sequences: SequenceIndex,
        vocab: Vocab,
        batch_size: int,
        micro_batch: int,
        mask_rate: float | None,
        seed: int,
        processes: int = 1,
        rank: int = 0,
        packed: bool = False,
        pad_predictions_to: int | None = None,
    ) -> None:
        check_batch_size(batch_size, micro_batch, processes)
        self.sequences, self.vocab = sequences, vocab
        self.batch_size, self.micro_batch = batch_size, micro_batch
        self.mask_rate, self.seed = mask_rate, seed
        self.processes, self.rank = processes, rank
        self.packed, self.pad_predictions_to = packed, pad_predictions_to

    def micro_batch_indices(
        self, step: int, rank: int | None = None
    ) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Sequences of each micro-batch of a process, this one or another, and how often each was
        seen before.
        """  # noqa: D205 one sentence
        place = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        group = max(GROUP, self.batch_size // GROUPS_A_STEP)
        index, visit = training_order(self.sequences, place, self.seed, group)
        by_length = np.argsort(self.sequences.spans(index)[1], kind="stable")
        # neighbours in length go to different processes at the same time: equal work, no waiting
        first = self.rank if rank is None else rank
        own = by_length.reshape(-1, self.micro_batch)[first :: self.processes]
        return [(index[rows], visit[rows]) for rows in own]

    def __getitem__(self, step: int) -> list[dict[str, Any]]:
        """All micro-batches this process computes in that step."""
        rules = (self.vocab, self.mask_rate, self.seed, self.packed, self.pad_predictions_to)
        return [
            make_batch(self.sequences, index, visit, *rules)
            for index, visit in self.micro_batch_indices(step)
        ]
