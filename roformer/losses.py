"""Which outputs a loss needs: of padding, or of labelled tokens only."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .kernels import AUTO, UNPADDED, kernels_enabled
from .kernels.dispatch import has_hidden_values, is_plain

IGNORE_INDEX = -100
"""Label of tokens without one, as in transformers."""


def loss_ignores_padding(
    model: PreTrainedModel, labels: Tensor | None, attention_mask: Any, shift: int = 0
) -> bool:
    """Return False if the loss needs outputs at padding.

    Args:
        model: The model with its head.
        labels: [B, L], -100 for tokens without one.
        attention_mask: [B, L], or any other mask.
        shift: Tokens between an output and its label; 1 for causal models.
    """
    implementation = model.config._attn_implementation
    if labels is None or getattr(attention_mask, "shape", 0) != getattr(labels, "shape", 1):
        return True
    # other devices would have to be waited for, which "auto" never does
    if implementation not in (AUTO, UNPADDED) or (implementation == AUTO and not is_plain(labels)):
        return True
    if has_hidden_values(labels):
        return True
    at_padding = attention_mask[:, : labels.shape[1] - shift] == 0
    return not bool((labels[:, shift:][at_padding] != IGNORE_INDEX).any())


def is_sparse_loss_faster(labels: Tensor, hidden_states: Tensor) -> bool:
    """Return whether the loss should have logits of its own, of the labelled tokens only.

    Running the head again on fewer than half of the tokens takes less time than its backward pass
    over the others.
    """
    if not (hidden_states.requires_grad and is_plain(labels) and kernels_enabled()):
        return False
    return 2 * int((labels != IGNORE_INDEX).sum()) < labels.numel()
