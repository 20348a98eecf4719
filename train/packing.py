"""Token ids to batches: documents cut at the length, ordered, grouped so that little is padding.

Everything is a pure function of (settings, seed, step), the same for every number of processes: the
loader's whole state is the step. Legend: B batch, L tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from train import counter
from train.corpus import TokenStore
from train.masking import corrupt
from train.settings import require

WINDOW = 2048
"""Sequences that are sorted by length together; more would save hardly any padding."""

GROUP = 8
"""Sequences of like length that stay neighbours: steps mix groups, so a step sees all lengths."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids the data path needs to know."""

    first: int
    last: int
    padding: int
    mask: int
    vocabulary: int
    unmaskable: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "SpecialTokens":
        """Read them off a tokenizer.

        Raises:
            InputError: It lacks one that masked language modelling needs.
        """
        names = ("cls_token_id", "sep_token_id", "pad_token_id", "mask_token_id")
        ids = [getattr(tokenizer, name) for name in names]
        missing = [name for name, value in zip(names, ids) if value is None]
        rule = "must have [CLS], [SEP], [PAD] and [MASK]"
        require(
            not missing, "corpus.tokenizer", rule, f"none for {missing}", "use a BERT tokenizer"
        )
        first, last, padding, mask = ids
        unmaskable = tuple(sorted(tokenizer.all_special_ids))
        return cls(first, last, padding, mask, len(tokenizer), unmaskable)


class Sequences:
    """Documents of a store cut into pieces of at most `length` tokens, special tokens included.

    A piece never crosses a document's end. Memory is O(documents); a piece is found by bisection.
    """

    def __init__(self, store: TokenStore, length: int) -> None:
        self.store = store
        self.content = length - 2  # [CLS] and [SEP] come on top
        self.starts = np.concatenate(([0], store.ends[:-1]))
        pieces = -(-(store.ends - self.starts) // self.content)
        self.first_piece = np.concatenate(([0], np.cumsum(pieces)))

    def __len__(self) -> int:
        return int(self.first_piece[-1])

    @property
    def mean_length(self) -> float:
        """Mean tokens a sequence, [CLS] and [SEP] included."""
        return 2 + int(self.store.ends[-1]) / len(self)

    def spans(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start in the token file and number of tokens of each piece."""
        document = np.searchsorted(self.first_piece, index, side="right") - 1
        start = self.starts[document] + (index - self.first_piece[document]) * self.content
        return start, np.minimum(self.content, self.store.ends[document] - start)


def ordered(sequences: Sequences, place: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Which sequence stands at each place of the endless training order.

    Epoch e fills places e*N .. (e+1)*N - 1 with every sequence once. Inside a window of the epoch's
    permutation, sequences are sorted by length and groups of neighbours are shuffled.
    """
    N = len(sequences)  # noqa: N806
    epoch, inside = np.divmod(place, N)
    result = np.empty_like(place)
    for key in {(int(e), int(w)) for e, w in zip(epoch, inside // WINDOW)}:
        here = (epoch == key[0]) & (inside // WINDOW == key[1])
        result[here] = _window(sequences, *key, seed)[inside[here] % WINDOW]
    return result


def _window(sequences: Sequences, epoch: int, window: int, seed: int) -> NDArray[np.int64]:
    places = np.arange(window * WINDOW, min((window + 1) * WINDOW, len(sequences)))
    index = counter.permuted(places, len(sequences), seed, epoch)
    index = index[np.argsort(sequences.spans(index)[1], kind="stable")]
    groups = [index[i : i + GROUP] for i in range(0, len(index), GROUP)]
    shuffled = np.argsort(counter.bits(seed, epoch, window, np.arange(len(groups))))
    return np.concatenate([groups[i] for i in shuffled])


def examples(
    sequences: Sequences,
    index: NDArray[np.int64],
    epoch: NDArray[np.int64],
    special: SpecialTokens,
    mask_rate: float,
    seed: int,
) -> dict[str, Tensor]:
    """Masked examples of the given sequences, padded to the longest of them.

    Returns:
        input_ids: [B, L] int64, corrupted.
        attention_mask: [B, L] int64, 0 on padding.
        places: [n] int64, where the predicted tokens stand in the flattened [B * L].
        targets: [n] int64, their original ids.
    """
    start, size = sequences.spans(index)
    L = int(size.max()) + 2  # noqa: N806
    ids = np.full((len(index), L), special.padding, np.int64)
    for row, (a, n) in enumerate(zip(start, size)):
        ids[row, 0], ids[row, n + 1] = special.first, special.last
        ids[row, 1 : n + 1] = sequences.store.tokens[a : a + n]
    attention_mask = np.arange(L) < size[:, None] + 2
    corrupted, chosen = corrupt(ids, index, epoch, special, mask_rate, seed)
    return {
        "input_ids": torch.from_numpy(corrupted),
        "attention_mask": torch.from_numpy(attention_mask.astype(np.int64)),
        "places": torch.from_numpy(np.flatnonzero(chosen)),
        "targets": torch.from_numpy(ids[chosen]),
    }


def require_shares(batch_size: int, micro_batch: int, processes: int) -> None:
    """Refuse a batch that cannot be shared out evenly.

    Raises:
        InputError: It is no multiple of what all processes take at once.
    """
    share = micro_batch * processes
    rule = "must be a multiple of optim.micro_batch times the processes"
    rule += f" ({micro_batch} x {processes} = {share})"
    require(batch_size % share == 0, "optim.batch_size", rule, batch_size, "change either")


class Steps(Dataset):
    """The micro-batches of one process, by optimiser step."""

    def __init__(
        self,
        sequences: Sequences,
        special: SpecialTokens,
        batch_size: int,
        micro_batch: int,
        mask_rate: float,
        seed: int,
        processes: int = 1,
        rank: int = 0,
    ) -> None:
        require_shares(batch_size, micro_batch, processes)
        self.sequences, self.special = sequences, special
        self.batch_size, self.micro_batch = batch_size, micro_batch
        self.mask_rate, self.seed = mask_rate, seed
        self.processes, self.rank = processes, rank

    def __getitem__(self, step: int) -> list[dict[str, Tensor]]:
        """All micro-batches this process computes in that step."""
        place = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        index, epoch = ordered(self.sequences, place, self.seed), place // len(self.sequences)
        by_length = np.argsort(self.sequences.spans(index)[1], kind="stable")
        # neighbours in length go to different processes at the same time: equal work, no waiting
        mine = by_length.reshape(-1, self.micro_batch)[self.rank :: self.processes]
        return [
            examples(self.sequences, index[m], epoch[m], self.special, self.mask_rate, self.seed)
            for m in mine
        ]
