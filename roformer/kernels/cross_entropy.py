"""Cross-entropy over a vocabulary on a CPU, a few rows of logits at a time.

torch makes several float32 tensors of the size of all logits. For 614 rows of 16,384 in bfloat16 on
one core that is 95 ms of the 181 ms that the head of a small model takes; here it is 35 ms.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .conditions import may_use_kernel

CHUNK_SIZE = 2**17
"""Number of logits per thread, half a megabyte in float32, that stay in the cache; a chunk has more
only if a single row has."""


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Sum the cross-entropies of logits [n, V] of any dtype and labels [n], float32 scalar.

    On a CPU the logits are kept for the backward pass, and must not be changed before it.
    """
    fits = labels.shape == logits.shape[:1]  # torch refuses others
    if fits and may_use_kernel(logits, labels):
        return _CrossEntropy.apply(logits, labels, ignore_index)
    return F.cross_entropy(logits.float(), labels, ignore_index=ignore_index, reduction="sum")


def _split_rows(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split logits [n, V], and other tensors [n, ...] likewise, into chunks of rows."""
    rows = max(1, CHUNK_SIZE // logits.shape[1]) * torch.get_num_threads()
    return zip(*(x.split(rows) for x in (logits, *others)), strict=True)


class _CrossEntropy(torch.autograd.Function):
    """Keeps logits and labels; the backward pass computes the softmax again."""

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        """[n, V] and [n] to a scalar."""
        loss = torch.zeros((), dtype=torch.float32, device="cpu")
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
        is_labelled = (labels != ctx.ignore_index)[:, None]
        # selected, not multiplied: the gradient of a mean over no labels is infinite
        factors = torch.where(is_labelled, grad_loss, 0.0)  # [n, 1]
        columns = torch.where(is_labelled, labels[:, None], 0).long()
        if torch.is_grad_enabled():  # create_graph=True: to be differentiated again
            probs = F.softmax(logits, dim=-1, dtype=torch.float32)
            one_hot = F.one_hot(columns[:, 0], logits.shape[1])
            return ((probs - one_hot) * factors).to(logits.dtype), None, None
        grad_logits = torch.empty_like(logits)
        chunks = _split_rows(logits, columns, factors, grad_logits)
        for chunk, column, factor, grad in chunks:
            probs = F.softmax(chunk, dim=-1, dtype=torch.float32)
            probs.scatter_add_(1, column, probs.new_full(column.shape, -1.0))
            grad.copy_(probs.mul_(factor))
        return grad_logits, None, None
