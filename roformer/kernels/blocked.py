"""Softmax attention for a CPU, some heads and queries at a time.

torch's fused kernel for a CPU has no dropout and hardly uses the processor's bfloat16 units; the
product written out uses them, but sends scores of all pairs of tokens through memory several times.
Here a block of scores stays in the cache, and is computed again in the backward pass instead of
being kept (Dao et al. 2022, "FlashAttention", arXiv:2205.14135, algorithms 1 and 4, with blocks of
queries only). Scores have the dtype of the queries, as in the eager kernel; torch's keeps them in
float32, which in bfloat16 is two to five times as exact.

What that gains depends on the memory allocator. At 2,048 tokens it is half of the memory always; in
a process of its own also 0.7 of the time with dropout (without, 0.8 to 1.1), and where freed memory
stays mapped 1.1 to 1.5 times the time (levers in results/bench-cpu.md).

Legend: N batch times heads, L queries, S keys, D head width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dropout import LEVELS, draw

ELEMENTS = 2**20
"""Scores of a block: 2 MiB in bfloat16."""

LEAST_QUERIES = 256
"""Of a block: fewer do not fill a matrix product."""


def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float
) -> Tensor:
    """Softmax(q k^T scaling) v without a mask.

    Args:
        query: [B, H, L, D], on a CPU.
        key: [B, H, S, D].
        value: [B, H, S, D].
        scaling: Factor on the scores.
        dropout: Probability of dropping an attention weight, rounded to 1/65,536.

    Returns:
        [B, H, L, D].
    """
    heads = [x.to(query.dtype).flatten(0, 1) for x in (query * scaling, key, value)]
    dropped = min(round(dropout * LEVELS), LEVELS - 1)
    return _Blocked.apply(*heads, dropped).unflatten(0, query.shape[:2])


def _blocks(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Heads and queries of each block: several whole heads, or some queries of one."""
    (N, L, _), S = query.shape, key.shape[1]  # noqa: N806
    heads = max(1, ELEMENTS // max(1, L * S))
    rows = max(1, L) if heads > 1 else max(LEAST_QUERIES, ELEMENTS // S)
    for first in range(0, N, heads):
        for row in range(0, L, rows):
            yield slice(first, first + heads), slice(row, row + rows)


class _Blocked(torch.autograd.Function):
    """Keeps queries, keys, values and a seed."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, dropped: int) -> Tensor:
        """[N, L, D], [N, S, D] twice; `dropped` in 65,536ths."""
        ctx.dropped = dropped
        ctx.seed = int(torch.randint(2**32, (), device="cpu")) if dropped else 0
        ctx.save_for_backward(query, key, value)
        mixed = torch.empty_like(query)
        generator = torch.Generator("cpu").manual_seed(ctx.seed)
        for heads, rows in _blocks(query, key):
            weights = _weights(query[heads, rows], key[heads])
            if dropped:
                weights.mul_(draw(weights.shape, dropped, generator))
            mixed[heads, rows] = torch.bmm(weights, value[heads])
        return mixed.mul_(LEVELS / (LEVELS - dropped)) if dropped else mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Each block's weights once more, with the same draws."""
        query, key, value = ctx.saved_tensors
        slope = gradients[0] * (LEVELS / (LEVELS - ctx.dropped))
        d_query = torch.empty_like(query)
        exact = torch.promote_types(key.dtype, torch.float32)  # for sums over blocks
        d_key, d_value = (torch.zeros_like(x, dtype=exact) for x in (key, value))
        generator = torch.Generator("cpu").manual_seed(ctx.seed)
        for heads, rows in _blocks(query, key):
            weights = _weights(query[heads, rows], key[heads])
            d_weights = torch.bmm(slope[heads, rows], value[heads].transpose(1, 2))
            left = weights
            if ctx.dropped:
                kept = draw(weights.shape, ctx.dropped, generator)
                left = weights * kept
                d_weights.mul_(kept)
            d_value[heads] += torch.bmm(left.transpose(1, 2), slope[heads, rows])
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            d_query[heads, rows] = torch.bmm(d_scores, key[heads])
            d_key[heads] += torch.bmm(d_scores.transpose(1, 2), query[heads, rows])
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None


def _weights(query: Tensor, key: Tensor) -> Tensor:
    return torch.softmax(torch.bmm(query, key.transpose(1, 2)), dim=-1)
