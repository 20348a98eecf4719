"""Labels and losses of the heads."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from .configuration_roformer import RoFormerConfig
from .input_checks import Sizes, check_shape
from .kernels import AUTO, UNPADDED, kernels_enabled
from .kernels.dispatch import is_plain, values_are_unreadable

logger = logging.get_logger(__name__)

IGNORE_INDEX = -100
"""Label of tokens without one, as in transformers."""


def check_labels(
    labels: Any, *shapes: Sizes, num_classes: int | None = None, name: str = "labels"
) -> Tensor | None:
    """Check class ids of one of the shapes and return them as int64; None stays None.

    Ids must be below `num_classes` if it is given, or -100 for none; like those of the inputs they
    are checked on a CPU only.

    Raises:
        ValueError: Labels of another type, shape or value; one line that names the argument.
    """
    if labels is None:
        return None
    check_shape(name, labels, *shapes)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {labels.dtype}")
    if num_classes is not None and is_plain(labels, "cpu"):
        given = labels[labels != IGNORE_INDEX]
        invalid = given[(given < 0) | (given >= num_classes)]
        if len(invalid):
            raise ValueError(
                f"{name} must be at least 0 and below {num_classes}, or {IGNORE_INDEX} for none, "
                f"got {int(invalid[0])}"
            )
        if not len(given):
            logger.warning_once(f"all labels of a batch are {IGNORE_INDEX}: their mean loss is NaN")
    return labels.long()


def check_sequence_labels(
    labels: Any, config: RoFormerConfig, num_labels: int, batch_size: int
) -> Tensor | None:
    """Check the labels of sequences by `config.problem_type`, or as transformers derives it.

    They are [B] class ids, [B] values of a regression, or [B, num_labels].

    Raises:
        ValueError: As `check_labels`.
    """
    if labels is None:
        return None
    check_shape("labels", labels, (batch_size,), (batch_size, None))
    has_classes = config.problem_type == "single_label_classification"
    if config.problem_type is None and num_labels > 1:
        has_classes = not labels.is_floating_point() and labels.dtype != torch.bool
    if has_classes:
        return check_labels(labels, (batch_size,), (batch_size, 1), num_classes=num_labels)
    if num_labels > 1 and tuple(labels.shape) != (batch_size, num_labels):
        raise ValueError(
            f"labels must be integers to choose one of {num_labels} classes, or have the shape "
            f"[{batch_size}, {num_labels}], got {labels.dtype} of shape {list(labels.shape)}"
        )
    if config.problem_type == "multi_label_classification":
        check_shape("labels", labels, (batch_size, num_labels))
    elif num_labels == 1:
        check_shape("labels", labels, (batch_size,), (batch_size, 1))
    return labels if labels.is_floating_point() else labels.float()


def compute_loss(
    model: PreTrainedModel, logits: Tensor, labels: Tensor | None, **kwargs: Any
) -> Tensor | None:
    """Compute transformers' loss of a head, in float32."""
    if labels is None:
        return None
    # the loss calls view, which needs contiguous labels
    return model.loss_function(logits=logits, labels=labels.contiguous(), **kwargs)


def may_unpad_for_loss(
    model: PreTrainedModel, labels: Tensor | None, attention_mask: Any, shift: int = 0
) -> bool:
    """Return False if `auto` or `unpadded` would leave out an output that [B, L] labels need.

    Other implementations leave nothing out: then it is True. `shift` is the number of tokens
    between an output and its label, 1 for causal models.
    """
    if labels is None or attention_mask is None:
        return True
    if getattr(attention_mask, "shape", None) != getattr(labels, "shape", None):
        return False
    implementation = model.config._attn_implementation
    # "auto" does not wait for another device to read its labels
    if implementation not in (AUTO, UNPADDED) or (
        implementation == AUTO and not is_plain(labels, "cpu")
    ):
        return True
    if values_are_unreadable(labels):
        return True
    at_padding = attention_mask[:, : labels.shape[1] - shift] == 0
    return not bool((labels[:, shift:][at_padding] != IGNORE_INDEX).any())


def is_sparse_loss_faster(labels: Tensor, hidden_states: Tensor) -> bool:
    """Return whether the loss should have logits of its own, of the labelled tokens only.

    Running the head again on fewer than half of the tokens takes less time than its backward pass
    over the others.
    """
    if not (hidden_states.requires_grad and is_plain(labels, "cpu") and kernels_enabled()):
        return False
    return 2 * int((labels != IGNORE_INDEX).sum()) < labels.numel()
