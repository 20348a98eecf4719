"""Dropout on a CPU that draws the random bits of four elements at a time.

torch draws one random number per element on one thread, which in bfloat16 takes longer than the
matrix products beside it. One 64-bit draw holds four numbers of 16 bits, enough for a probability
in steps of 1/65,536.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .conditions import may_use_kernel

LEVELS = 65536
"""Number of values of 16 bits."""


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Zero elements with probability p and scale the others by 1 / (1 - p).

    On a CPU p is rounded to 1/65,536, and the mask kept for the backward pass takes one byte per
    element. On other devices, and under compilers and torch.func, this is torch's dropout.
    """
    kept, factor = dropout_unscaled(x, p if training else 0.0)
    return kept if factor == 1 else kept.mul_(factor)


def dropout_unscaled(x: Tensor, p: float) -> tuple[Tensor, float]:
    """Zero elements with probability p; returns also the factor that all are to be scaled by.

    A product of x with another tensor may be smaller than x, and is then scaled in less time.
    """
    dropped = round(p * LEVELS)
    if not p:
        return x, 1.0
    if dropped in (0, LEVELS) or not may_use_kernel(x):
        return F.dropout(x, p), 1.0
    return x * _keep_mask(x.shape, dropped), LEVELS / (LEVELS - dropped)


def _keep_mask(shape: torch.Size, dropped: int) -> Tensor:
    """Draw 0 with probability dropped / 65,536 and 1 otherwise, uint8 of the given shape.

    uint8, because products with bool are four times slower.
    """
    numel = shape.numel()
    draws = torch.empty(-(-numel // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None)
    mask = torch.empty(shape, dtype=torch.uint8, device="cpu")
    return torch.ge(draws.view(torch.int16)[:numel].view(shape), dropped - LEVELS // 2, out=mask)


class Dropout(nn.Dropout):
    """`nn.Dropout` computed by `dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, any floating dtype."""
        return dropout(x, self.p, self.training)
