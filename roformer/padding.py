"""Which tokens of a batch belong together: documents packed into rows, padding, and how to drop it.

transformers' bidirectional masks ignore `position_ids`, so packed rows would silently attend across
documents; here every attention kernel is told. Legend: B rows, L tokens a row, T tokens in all.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .kernels.dispatch import has_hidden_values


def from_borders(borders: Tensor, shape: tuple[int, int]) -> Tensor:
    """The document of each token, from cumulative lengths.

    Args:
        borders: `cu_seq_lens_q`, [documents + 1]: 0, end of the first, ..., B * L, over all rows.
        shape: B, L.

    Returns:
        [B, L] int64, numbers that grow by one from document to document.
    """
    tokens = torch.arange(shape[0] * shape[1], device=borders.device)
    owners = torch.bucketize(tokens, borders[1:].to(tokens.dtype), right=True)
    # counted anew, because empty documents leave gaps
    return torch.nn.functional.pad(owners.diff() != 0, (1, 0)).cumsum(dim=0).view(shape)


def from_positions(positions: Tensor, real: Tensor) -> Tensor | None:
    """The document of each token, from positions that start anew.

    A row is packed when its positions count up by one, apart from returns to 0; its first document
    may have begun in an earlier row. Any other row, with gaps or in another order, is one document
    with unusual positions, and so is one that counts from below 0 through 0.

    Args:
        positions: [B, L].
        real: [B, L], False for padding, whose positions mean nothing.

    Returns:
        [B, L] int64, counting from 0 in each row; None when no row is packed, which without values
        is not to be known.
    """
    first = real & (real.cumsum(dim=-1) == 1)  # with padding on the left, not the first of the row
    follows = positions == positions.roll(1, dims=-1) + 1
    returns = (positions == 0) & ~(follows & real.roll(1, dims=-1))
    starts = (returns | first) & real
    counted = follows | starts | ~real
    numbers = starts.long().cumsum(dim=-1)
    numbers = (numbers - 1).clamp(min=0) * counted.all(dim=-1, keepdim=True)
    if not has_hidden_values(positions) and not numbers.any():
        return None
    return numbers


def positions_within(documents: Tensor) -> Tensor:
    """The position of each token in its document, [B, L], from the numbers of `from_borders`."""
    flat = documents.flatten()
    tokens = torch.arange(flat.shape[0], device=flat.device)
    starts = torch.nn.functional.pad(flat.diff() != 0, (1, 0), value=True)
    return (tokens - torch.where(starts, tokens, 0).cummax(dim=0).values).view(documents.shape)


@dataclass(frozen=True)
class Batch:
    """Where the tokens of a call stand and what belongs together.

    Attributes:
        positions: [1 or B, L] integers.
        real: [B, L] bool, False for padding; None when only a ready-made mask knows.
        documents: [B, L] numbers; None when every row is one document.
    """

    positions: Tensor
    real: Tensor | None
    documents: Tensor | None

    def lengths(self) -> Tensor:
        """For each token the length of its row or document, from the first position to the last.

        Padding does not count, so a row is as long as it would be alone; [B, L] int64.
        """
        positions = self.positions.long()
        real = torch.ones_like(positions, dtype=torch.bool) if self.real is None else self.real
        positions = positions.expand(real.shape)
        limits = torch.iinfo(torch.int64)
        first, last = (positions.masked_fill(~real, v) for v in (limits.max, limits.min))
        if self.documents is None:
            length = last.amax(dim=-1, keepdim=True) - first.amin(dim=-1, keepdim=True) + 1
            return length.expand(positions.shape)
        numbers = self.documents - self.documents[:, :1]
        ends = last.scatter_reduce(1, numbers, last, "amax", include_self=False)
        begins = first.scatter_reduce(1, numbers, first, "amin", include_self=False)
        return (ends - begins + 1).gather(1, numbers)


def arrange(
    words: Tensor,
    start: int | Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    borders: Tensor | None,
    follows: bool = False,
) -> Batch:
    """Read positions, padding and documents off the arguments of a call.

    Args:
        words: [B, L] or [B, L, E]; only its shape and device are read.
        start: Tokens in the cache, which positions count from when none are given.
        attention_mask: [B, S] or anything else, which says nothing here.
        position_ids: [L] or [1 or B, L], or None.
        borders: [documents + 1] cumulative lengths over the flattened rows, or None. Without them
            packed documents are looked for in `position_ids`, in a row that follows no tokens.
        follows: Whether there is a cache, which may be empty: then nothing is looked for while
            compiling, when every row would have to be taken for a packed one.
    """
    B, L = words.shape[:2]  # noqa: N806
    real: Tensor | None = None
    if attention_mask is None:
        real = torch.ones(B, L, dtype=torch.bool, device=words.device)
    elif isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        real = attention_mask[:, -L:].to(words.device).bool()
    if borders is not None:
        owners = from_borders(borders.to(words.device), (B, L))
        if position_ids is None:
            return Batch(positions_within(owners), real, owners)
        return Batch(position_ids.to(words.device).long().view(-1, L), real, owners)
    if position_ids is None:
        return Batch((torch.arange(L, device=words.device) + start)[None], real, None)
    positions = position_ids.to(words.device).long().view(-1, L)
    numbers: Tensor | None = None
    known = not (follows and torch.compiler.is_compiling())
    if real is not None and known and L > 1 and int(start) == 0:
        numbers = from_positions(positions.expand(B, L), real)
    return Batch(positions, real, numbers)


@dataclass(frozen=True)
class Unpadded:
    """Real tokens of a batch in one row, as kernels for variable lengths want them.

    Attributes:
        places: [T] int64, where each token stands in the flattened [B * L].
        borders: [documents + 1] int32, cumulative lengths.
        longest: Tokens of the longest document.
        shape: B, L.
    """

    places: Tensor
    borders: Tensor
    longest: int
    shape: tuple[int, int]

    def pack(self, x: Tensor) -> Tensor:
        """[B, L, ...] to [1, T, ...]."""
        return x.flatten(0, 1)[self.places].unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """[1, T, ...] to [B, L, ...], zeros where the padding was."""
        rows = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return rows.index_copy(0, self.places, x[0]).unflatten(0, self.shape)


def unpad(real: Tensor, documents: Tensor | None) -> Unpadded | None:
    """Find the real tokens and the borders of documents among them; waits for the device.

    Returns:
        None when there is no real token at all.

    Args:
        real: [B, L], False for padding.
        documents: [B, L] numbers of documents, or None: every row is one.
    """
    B, L = real.shape  # noqa: N806
    places = real.flatten().nonzero().flatten()
    owner = torch.arange(B, device=real.device).repeat_interleave(L) * L  # rows apart
    if documents is not None:
        owner = owner + documents.flatten() - documents[:, :1].repeat_interleave(L)
    starts = torch.nn.functional.pad(owner[places].diff() != 0, (1, 1), value=True)
    borders = starts.nonzero().flatten().to(torch.int32)
    if not len(places):
        return None
    return Unpadded(places, borders, int(borders.diff().max()), (B, L))


@dataclass(frozen=True)
class Apart:
    """Every document in a row of its own, for what cannot keep documents of a row apart.

    Attributes:
        row: [B, L] int64, the row of each token.
        column: [B, L] its place in that row.
        shape: Rows, tokens of the longest.
    """

    row: Tensor
    column: Tensor
    shape: tuple[int, int]

    def pack(self, x: Tensor) -> Tensor:
        """[B, L, ...] to [rows, longest, ...], zeros where nothing is."""
        empty = x.new_zeros(*self.shape, *x.shape[2:])
        return empty.index_put((self.row, self.column), x)

    def unpack(self, x: Tensor) -> Tensor:
        """[rows, longest, ...] to [B, L, ...]."""
        return x[self.row, self.column]


def apart(documents: Tensor) -> Apart:
    """Rows for the documents of `from_borders` or `from_positions`; waits for the device."""
    B, L = documents.shape  # noqa: N806
    rows = torch.arange(B, device=documents.device)[:, None] * L
    owner = (documents - documents[:, :1] + rows).flatten()
    row = torch.nn.functional.pad(owner.diff() != 0, (1, 0)).cumsum(dim=0).view(B, L)
    column = positions_within(row)
    return Apart(row, column, (int(row.max()) + 1, int(column.max()) + 1))


def kernel_options(borders: Tensor, longest: int | None) -> dict[str, Any]:
    """Borders of documents under the names that transformers' kernels know.

    Args:
        borders: [documents + 1] cumulative lengths.
        longest: Tokens of the longest document; None looks, and so waits for the device.
    """
    if longest is None:
        longest = int(borders.diff().max())
    borders = borders.to(torch.int32)
    return {
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": longest,
        "max_length_k": longest,
    }
