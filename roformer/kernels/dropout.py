"""Dropout that a CPU can afford: its random bits are drawn four numbers at a time.

On a CPU torch draws one random number an element on one thread, which in bfloat16 takes longer than
the matrix products beside it. One 64-bit draw holds four numbers of 16 bits, enough for a
probability in steps of 1/65,536. What it gains: results/bench-cpu.md, under levers.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .dispatch import is_plain

LEVELS = 65536
"""Values of 16 bits."""


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Zero elements with a probability and scale the others by what keeps the mean.

    On a CPU the probability is rounded to 1/65,536, and the mask kept for the backward pass has one
    byte an element; elsewhere, and under compilers and torch.func, it is torch's dropout.

    Args:
        x: Any shape, any floating dtype.
        probability: From 0 to 1.
        training: False returns x itself.
    """
    dropped = round(probability * LEVELS)
    if not training or not probability:
        return x
    if not is_plain(x) or dropped in (0, LEVELS):
        return F.dropout(x, probability)
    return _Dropout.apply(x, dropped)


def draw(shape: torch.Size, dropped: int, generator: torch.Generator | None = None) -> Tensor:
    """Which elements stay, as 0 and 1 of uint8: products with bool are four times slower.

    Args:
        shape: Any.
        dropped: Probability of a 0, in 65,536ths.
        generator: On the CPU; None is torch's own.
    """
    number = shape.numel()
    draws = torch.empty(-(-number // 4), dtype=torch.int64, device="cpu")
    draws.random_(-(2**63), None, generator=generator)
    kept = torch.empty(shape, dtype=torch.uint8, device="cpu")
    return torch.ge(draws.view(torch.int16)[:number].view(shape), dropped - LEVELS // 2, out=kept)


class Dropout(nn.Dropout):
    """torch's module, computed by `dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, any floating dtype."""
        return dropout(x, self.p, self.training)


class _Dropout(torch.autograd.Function):
    """Keeps the mask in bytes; a gradient of the gradient is possible."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: int) -> Tensor:
        """`dropped` in 65,536ths."""
        kept = draw(x.shape, dropped)
        ctx.save_for_backward(kept)
        ctx.scale = LEVELS / (LEVELS - dropped)
        return (x * ctx.scale).mul_(kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Through what was kept."""
        (kept,) = ctx.saved_tensors
        return gradients[0] * ctx.scale * kept, None
