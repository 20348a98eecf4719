"""Positions, padding and packed documents of a batch, and the rows that layers compute in.

transformers' bidirectional masks ignore `position_ids`, so that packed documents would attend to
each other. Here the document of each token is computed once, for all attention implementations. A
row that is not packed is one document.

Legend: B batch, L columns of a row, padding included, T tokens of a layout.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernels.conditions import can_read_values, is_traced


@dataclass(frozen=True)
class BatchMetadata:
    """Positions, padding and documents of a batch.

    Attributes:
        position_ids: [1 or B, L] integers.
        attention_mask: As given to the model.
        padding_mask: [B, L] bool, True at tokens and False at padding, as in transformers; None if
            only a four-dimensional mask is known.
        document_ids: [B, L] int64, numbered from 0 over all rows, for lengths of documents and
            dynamic rope; None if every row is one document and `cu_seqlens` was not given.
        cu_seqlens: [documents + 1] cumulative lengths of the documents, if they were given.
        max_seqlen: Length of the longest document, if it was given.
    """

    position_ids: Tensor
    attention_mask: Any
    padding_mask: Tensor | None
    document_ids: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int | None

    @property
    def packed_document_ids(self) -> Tensor | None:
        """`document_ids` where a row holds several documents; None if each row is one.

        Not compared under a compiler, which would make the number of documents a constant.
        """
        if self.document_ids is None or self.cu_seqlens is None or is_traced():
            return self.document_ids
        num_documents, num_rows = len(self.cu_seqlens) - 1, len(self.document_ids)
        return self.document_ids if num_documents > num_rows else None

    def position_span_of_each_token(self) -> Tensor:
        """Return for each token the span of positions of its row or document, [B, L] int64.

        It is the length where positions have no gaps, counted without padding, so that it is the
        same in a batch as alone.
        """
        mask = self.padding_mask
        if mask is None:
            mask = torch.ones_like(self.position_ids, dtype=torch.bool)
        position_ids = self.position_ids.long().expand(mask.shape)
        ids = torch.zeros_like(position_ids)
        if self.document_ids is not None:
            ids = self.document_ids - self.document_ids[:, :1]
        limits = torch.iinfo(torch.int64)
        first, last = (position_ids.masked_fill(~mask, x) for x in (limits.max, limits.min))
        last = last.scatter_reduce(1, ids, last, "amax", include_self=False)
        first = first.scatter_reduce(1, ids, first, "amin", include_self=False)
        return (last - first + 1).gather(1, ids)


def describe_batch(
    inputs: Tensor,
    *,
    attention_mask: Any,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    past_length: int | Tensor,
    cache_given: bool,
) -> BatchMetadata:
    """Read positions, padding and documents from the arguments of `RoFormerModel.forward`.

    Of the inputs, ids or embeddings, only shape and device are read. Without `cu_seqlens` the
    documents of a single row are read from `position_ids`, unless tokens are cached. Default
    positions count from `past_length`, with `cu_seqlens` from 0 in each document.
    """
    (B, L), device = inputs.shape[:2], inputs.device  # noqa: N806
    padding_mask: Tensor | None = None
    if attention_mask is None:
        padding_mask = torch.ones(B, L, dtype=torch.bool, device=device)
    elif isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        padding_mask = attention_mask[:, -L:].to(device).bool()
    document_ids = None
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(device)
        tokens = torch.arange(B * L, device=device)
        ids = torch.bucketize(tokens, cu_seqlens[1:].to(tokens.dtype), right=True)
        # numbered again, because empty documents leave gaps
        document_ids = F.pad(ids.diff() != 0, (1, 0)).cumsum(dim=0).view(B, L)
    if position_ids is not None:
        position_ids = position_ids.to(device).long().view(-1, L)
        # a compiled model would have to treat every row as packed, and refuse even an empty cache
        can_look = not (cache_given and torch.compiler.is_compiling())
        may_be_packed = cu_seqlens is None and B == 1 and L > 1 and can_look
        if may_be_packed and padding_mask is not None and int(past_length) == 0:
            document_ids = document_ids_from_position_ids(position_ids, padding_mask)
    elif document_ids is not None:
        position_ids = positions_in_documents(document_ids)
    else:
        position_ids = (torch.arange(L, device=device) + past_length)[None]
    return BatchMetadata(
        position_ids, attention_mask, padding_mask, document_ids, cu_seqlens, max_seqlen
    )


def document_ids_from_position_ids(position_ids: Tensor, padding_mask: Tensor) -> Tensor | None:
    """Number the documents of one row, [1, L], whose positions count from 0 again and again.

    This is the form that transformers' `DataCollatorWithFlattening` makes. Any other row is one
    document, and so is a row of zeros only, which switches positions off. The positions of padding
    at the ends of the row and between documents are ignored.

    Returns:
        [1, L] int64, counting from 0; None if there is one document (which cannot be known while
        the values are hidden by a compiler).
    """
    # with padding on the left the first token is not the first of the row
    is_first = padding_mask & (padding_mask.cumsum(dim=-1) == 1)
    counts_up = (position_ids == position_ids.roll(1, dims=-1) + 1) & ~is_first
    is_start = (position_ids == 0) & padding_mask
    is_packed = (counts_up | is_start | ~padding_mask).all()
    is_packed = is_packed & (position_ids * padding_mask != 0).any()
    document_ids = (is_start.long().cumsum(dim=-1) - 1).clamp(min=0) * is_packed
    if can_read_values(position_ids) and not document_ids.any():
        return None
    return document_ids


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """Return the position of each token in its document, [B, L], counting from 0.

    No two rows of the batch may have a document id in common.
    """
    flat = document_ids.flatten()
    tokens = torch.arange(flat.shape[0], device=flat.device)
    is_start = F.pad(flat.diff() != 0, (1, 0), value=True)
    starts = torch.where(is_start, tokens, 0).cummax(dim=0).values
    return (tokens - starts).view(document_ids.shape)


@dataclass(frozen=True)
class Layout:
    """Rows in which the layers compute the tokens of a batch.

    Attributes:
        batch_indices: [T] int64, index of each token in the flattened batch, [B * L].
        row_indices: [T] int64, its index in the flattened rows of the layout.
        batch_shape: (B, L).
        shape: Number and length of the rows of the layout.
    """

    batch_indices: Tensor
    row_indices: Tensor
    batch_shape: tuple[int, int]
    shape: tuple[int, int]

    def to_layout(self, x: Tensor) -> Tensor:
        """Rearrange [B, L, ...] into the rows of the layout, with zeros where no token is."""
        return _rearrange(x, self.batch_indices, self.row_indices, self.shape)

    def to_batch(self, x: Tensor) -> Tensor:
        """Rearrange the rows of the layout into [B, L, ...], with zeros at tokens left out."""
        return _rearrange(x, self.row_indices, self.batch_indices, self.batch_shape)


def _rearrange(x: Tensor, source: Tensor, target: Tensor, shape: tuple[int, int]) -> Tensor:
    source, target = source.to(x.device), target.to(x.device)  # layers may be on several devices
    rows = x.new_zeros(prod(shape), *x.shape[2:])
    return rows.index_copy(0, target, x.flatten(0, 1)[source]).unflatten(0, shape)


def remove_padding(
    padding_mask: Tensor, document_ids: Tensor | None
) -> tuple[Layout, Tensor] | None:
    """Put all tokens of a batch in one row, as `unpad_input` of flash-attn does.

    On a CPU the row is lengthened by at most a 32nd, by zeros that are a document of their own, so
    that few lengths occur: with oneDNN, memory grows with the number of different shapes. Waits for
    the device, because the number of tokens decides shapes. The arguments are those of
    `BatchMetadata`.

    Returns:
        The layout, and the cumulative lengths of the documents, the added one included, int32; None
        if there are no tokens.
    """
    B, L = padding_mask.shape  # noqa: N806
    batch_indices = padding_mask.flatten().nonzero().flatten()
    if not len(batch_indices):
        return None
    if document_ids is None:
        document_ids = torch.arange(B, device=batch_indices.device)[:, None].expand(B, L)
    # [T + 1], the starts of documents and the end of the last
    is_boundary = F.pad(document_ids.flatten()[batch_indices].diff() != 0, (1, 1), value=True)
    cu_seqlens = is_boundary.nonzero().flatten().to(torch.int32)
    length = num_tokens = len(batch_indices)
    if padding_mask.device.type == "cpu":
        step = 1 << max(0, num_tokens.bit_length() - 6)  # at most 1/32 of them
        length = -(-num_tokens // step) * step
    if length > num_tokens:
        cu_seqlens = F.pad(cu_seqlens, (0, 1), value=length)
    row_indices = torch.arange(num_tokens, device=batch_indices.device)
    return Layout(batch_indices, row_indices, (B, L), (1, length)), cu_seqlens


def split_documents(document_ids: Tensor) -> Layout:
    """Give every document a row of its own, for attention that cannot mask documents of one row.

    Waits for the device.
    """
    (B, L), positions = document_ids.shape, positions_in_documents(document_ids)  # noqa: N806
    shape = int(document_ids.max()) + 1, int(positions.max()) + 1
    row_indices = (document_ids * shape[1] + positions).flatten()
    batch_indices = torch.arange(len(row_indices), device=row_indices.device)
    return Layout(batch_indices, row_indices, (B, L), shape)
