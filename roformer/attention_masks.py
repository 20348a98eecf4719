"""What attention kernels are told of padding, causality and documents, in the form each wants.

Legend: B batch, L tokens, S keys, H heads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    packed_sequence_mask_function,
)
from transformers.utils import logging

from .kernels import UNPADDED

logger = logging.get_logger(__name__)


def is_flash(kernel: str) -> bool:
    """Whether the kernel knows borders and no masks; kernels of the hub have such names too."""
    return "flash" in kernel


def is_ready_made(mask: Any) -> bool:
    """Whether it is a mask of four dimensions, which is taken as it is."""
    return isinstance(mask, Tensor) and mask.ndim == 4


def kernel_for_masks(kernel: str, documents: Tensor | None) -> str:
    """The kernel of a call that keeps documents apart by a mask, which flash kernels would drop."""
    if documents is None or not is_flash(kernel):
        return kernel
    logger.warning_once(
        f"attn_implementation={kernel!r} keeps documents apart in whole rows only; calls with a "
        "cache, cross-attention, output_hidden_states or a compiler are computed by sdpa"
    )
    return "sdpa"


def self_mask(
    config: PreTrainedConfig,
    kernel: str,
    words: Tensor,
    attention_mask: Any,
    documents: Tensor | None,
    causal: bool,
    past_key_values: Cache | None,
) -> Any:
    """The mask of a self-attention.

    Args:
        config: Of the model.
        kernel: Of this call.
        words: [B, L, E].
        attention_mask: As `RoFormerModel.forward`.
        documents: [B, L] numbers, or None where every row is one.
        causal: Whether tokens see earlier ones only.
        past_key_values: A decoder's cache.

    Raises:
        ValueError: The kernel takes no such mask, or none that keeps documents apart.
    """
    if is_ready_made(attention_mask):
        return _ready_made(kernel, words, attention_mask)
    if isinstance(attention_mask, BlockMask) and kernel != "flex_attention":
        raise ValueError(
            f"attention_mask must be a tensor with attn_implementation={kernel!r}, got a BlockMask,"
            " which is flex_attention's"
        )
    options: dict[str, Any] = {}
    if documents is not None:
        options["and_mask_function"] = packed_sequence_mask_function(documents)
    make: Callable[..., Any] = create_bidirectional_mask
    if causal:
        make, options["past_key_values"] = create_causal_mask, past_key_values
    mask = make(with_kernel(config, kernel), words, attention_mask=attention_mask, **options)
    if documents is not None and (mask is None or getattr(mask, "ndim", 4) == 2):
        raise ValueError(
            f"attn_implementation must take a mask for packed rows, got {kernel!r}, which has none "
            "that keeps documents apart; use sdpa"
        )
    return mask


def cross_mask(
    config: PreTrainedConfig,
    kernel: str,
    words: Tensor,
    source: Tensor | None,
    attention_mask: Tensor | None,
) -> Any:
    """The mask of a cross-attention; `attention_mask` is the encoder's, [B, S] or ready-made."""
    if source is None or attention_mask is None:
        return None
    if is_ready_made(attention_mask):
        return _ready_made(kernel, words, attention_mask)
    return create_bidirectional_mask(
        with_kernel(config, kernel),
        words,
        attention_mask=attention_mask,
        encoder_hidden_states=source,
    )


def with_kernel(config: PreTrainedConfig, kernel: str) -> PreTrainedConfig:
    """The configuration with the kernel of this call, in whose form masks are made."""
    if kernel == config._attn_implementation:
        return config
    other = object.__new__(type(config))  # not copy.copy, which torch 2.11's compiler cannot follow
    other.__dict__.update(config.__dict__)
    other._attn_implementation = kernel
    return other


def with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """What is added to scores: a mask, if there is one, and what positions say."""
    if mask is None:
        return bias
    told = mask + bias.to(mask.dtype)
    # two large values of float16 are -inf together, and a row of nothing else would be nan
    return told.clamp(min=torch.finfo(told.dtype).min) if told.dtype == torch.float16 else told


def _ready_made(kernel: str, words: Tensor, mask: Tensor) -> Tensor:
    """A [B or 1, 1 or H, L or 1, S] mask as a kernel takes it: sdpa bools, the others sums."""
    if is_flash(kernel):
        raise ValueError(
            f"attention_mask must be [B, S] with attn_implementation={kernel!r}, got shape "
            f"{tuple(mask.shape)}; use sdpa for masks of four dimensions"
        )
    if mask.is_floating_point():
        # the least of float32 would become -inf, and a row of nothing else nan
        mask = mask.to(words.dtype).clamp(min=torch.finfo(words.dtype).min)
    else:
        mask = mask.bool()
        if kernel not in ("sdpa", UNPADDED):
            least = torch.finfo(words.dtype).min
            mask = torch.zeros_like(mask, dtype=words.dtype).masked_fill(~mask, least)
    return mask.expand(words.shape[0], -1, words.shape[1], -1)
