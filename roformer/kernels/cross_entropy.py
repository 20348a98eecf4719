"""Cross-entropy over a vocabulary on a CPU, a few rows of logits at a time.

torch makes several float32 tensors of the size of all logits. They leave the cache and are new
memory in every step, which in a small model takes longer than the matrix products of the head.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .conditions import may_use_kernel

CHUNK_SIZE = 2**17
"""Maximum number of logits of a chunk, per thread: half a megabyte in float32, which stays in the
cache."""


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Sum the cross-entropies of logits [n, V] and labels [n] in float32, whatever their dtype."""
    fits = labels.shape == logits.shape[:1]  # torch refuses others
    if fits and may_use_kernel(logits, labels):
        return _CrossEntropy.apply(logits, labels, ignore_index)
    return _torch_cross_entropy(logits, labels, ignore_index)


def argmax(logits: Tensor) -> Tensor:
    """Return the index of the largest logit [n, V] of each row, [n].

    torch takes three times as long for those of bfloat16.
    """
    if may_use_kernel(logits):
        return torch.cat([chunk.float().argmax(dim=-1) for (chunk,) in _split_rows(logits)])
    return logits.argmax(dim=-1)


def _split_rows(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split logits [n, V], and other tensors [n, ...] likewise, into chunks of rows."""
    rows = max(1, CHUNK_SIZE // logits.shape[1]) * torch.get_num_threads()
    return zip(*(x.split(rows) for x in (logits, *others)))


def _torch_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=ignore_index, reduction="sum")


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits only; the backward pass computes their softmax again."""

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        """[n, V] and [n] to a scalar."""
        loss = torch.zeros((), device="cpu")
        for chunk, target in _split_rows(logits, labels):
            log_probs = F.log_softmax(chunk, dim=-1, dtype=torch.float32)
            loss += F.nll_loss(log_probs, target, ignore_index=ignore_index, reduction="sum")
        return loss

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep logits and labels."""
        logits, labels, ctx.ignore_index = inputs
        ctx.save_for_backward(logits, labels)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the softmax minus 1 at the label, times the gradient of the loss."""
        logits, labels = ctx.saved_tensors
        (grad_loss,) = gradients
        if torch.is_grad_enabled():  # it is to be differentiated again
            loss = _torch_cross_entropy(logits, labels, ctx.ignore_index)
            return *torch.autograd.grad(loss, logits, grad_loss, create_graph=True), None, None
        is_label = (labels != ctx.ignore_index)[:, None]
        columns, factors = labels[:, None] * is_label, grad_loss * is_label
        grad_logits = torch.empty_like(logits)
        chunks = _split_rows(logits, columns, factors, grad_logits)
        for chunk, column, factor, grad in chunks:
            probs = F.softmax(chunk, dim=-1, dtype=torch.float32)
            probs.scatter_add_(1, column, torch.full_like(factor, -1.0))
            grad.copy_(probs.mul_(factor))
        return grad_logits, None, None
