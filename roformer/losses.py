"""Losses of the heads, transformers' own, and whether a loss reads outputs at padding."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from .kernels import UNPADDED
from .kernels.conditions import can_read_values, is_plain_on, may_use_kernel
from .kernels.cross_entropy import cross_entropy

IGNORE_INDEX = -100
"""Label of tokens without one, as in transformers."""


def compute_loss(
    model: PreTrainedModel, logits: Tensor, labels: Tensor | None, **kwargs: Any
) -> Tensor | None:
    """Compute transformers' loss of a head, in float32; None without labels.

    That of a language model is computed by a kernel on a CPU, unless the user has replaced it, or
    passes `ignore_index` or `shift_labels`.
    """
    if labels is None:
        return None
    is_causal = model.loss_function is ForCausalLMLoss
    is_standard = is_causal or model.loss_function is ForMaskedLMLoss
    changes_labels = bool({"ignore_index", "shift_labels"} & kwargs.keys())
    if changes_labels or not is_standard or not may_use_kernel(logits, labels):
        # the loss calls view, which needs contiguous labels
        return model.loss_function(logits=logits, labels=labels.contiguous(), **kwargs)
    if is_causal:  # the label of an output is the next token
        labels = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
    count = kwargs.get("num_items_in_batch")
    if count is None:
        count = (labels != IGNORE_INDEX).sum()
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), IGNORE_INDEX) / count


def may_unpad_for_loss(
    model: PreTrainedModel, labels: Tensor | None, attention_mask: Any, shift: int = 0
) -> bool:
    """Return False if `auto` or `unpadded` would leave out an output that [B, L] labels need.

    Other implementations ignore the answer: most compute padding, flash attention never does. False
    where mask and labels differ in shape and cannot be compared.
    `shift` is the number of tokens between an output and its label, 1 for causal models.
    """
    if labels is None or attention_mask is None:
        return True
    if getattr(attention_mask, "shape", None) != getattr(labels, "shape", None):
        return False
    # `unpadded` leaves padding out on every device, and waits for the labels; `auto` on a CPU only
    must_read = model.config._attn_implementation == UNPADDED
    if not (can_read_values(labels) and (must_read or is_plain_on(labels, "cpu"))):
        return True
    at_padding = attention_mask[:, : labels.shape[1] - shift] == 0
    return not bool((labels[:, shift:][at_padding] != IGNORE_INDEX).any())


def is_sparse_loss_faster(labels: Tensor, hidden_states: Tensor) -> bool:
    """Return whether the loss should have logits of its own, of the labelled tokens only.

    Running the head again on fewer than half of the tokens takes less time than its backward pass
    over the others.
    """
    if not (hidden_states.requires_grad and may_use_kernel(labels)):
        return False
    return 2 * int((labels != IGNORE_INDEX).sum()) < labels.numel()
