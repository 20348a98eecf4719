"""Softmax attention: queries, keys and values in, mixed values out.

Kernels come from transformers' AttentionInterface by the name in `attn_implementation`: eager,
sdpa, flash_attention_2, flex_attention, and the one this module adds, `unpadded`, which needs no
dependency: tokens of all documents stand in one row and no arithmetic is spent on padding.
Attention without softmax is in `linear`.
"""

import inspect
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .dispatch import is_plain
from .dropout import dropout as drop

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # not in this torch: the loop below serves every device
    varlen_attn = None  # type: ignore[assignment]

UNPADDED = "unpadded"

CHUNK = 512
"""Queries of one head whose scores are computed at a time in inference on a CPU."""


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Softmax(q k^T / sqrt(D)) v, written out (equation 2 of the paper).

    Args:
        module: The attention layer, unused here.
        query: [B, H, L, D]; keys and values alike, with their own length S.
        key: [B, H, S, D].
        value: [B, H, S, D].
        attention_mask: Added to the scores, broadcastable to [B, H, L, S], or None.
        scaling: Factor on the scores, 1 / sqrt(D).
        dropout: Probability of dropping an attention weight.
        **kwargs: Options of other kernels, unused here.

    Returns:
        Mixed values [B, L, H, D] and probabilities [B, H, L, S].
    """
    scores = torch.matmul(query * scaling, key.transpose(-1, -2))
    if attention_mask is not None:
        scores = scores + attention_mask
        if scores.dtype == torch.float16:  # a row of nothing but -inf would be NaN
            scores = scores.clamp(min=torch.finfo(scores.dtype).min)
    probabilities = F.softmax(scores, dim=-1)
    weights = drop(probabilities, dropout, training=True)
    return torch.matmul(weights, value).transpose(1, 2), probabilities


def unpadded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention inside each document of one long row; without borders the same as sdpa.

    On CUDA (Ampere or later), in half precision, without dropout and with a head width that is a
    multiple of 8 up to 256, this is torch's `varlen_attn`. Elsewhere it is one call for each run of
    neighbouring documents of equal length: of scaled_dot_product_attention or, on a CPU in bfloat16
    or with dropout, of what is faster.

    Args:
        module: The attention layer; `is_causal` is read.
        query: [1, H, T, D]; keys and values alike.
        key: [1, H, T, D].
        value: [1, H, T, D].
        attention_mask: Only used when there are no borders.
        scaling: Factor on the scores; 1 / sqrt(D) for `varlen_attn`.
        dropout: Probability of dropping an attention weight.
        cu_seq_lens_q: [documents + 1] int32, 0 and the end of each document.
        max_length_q: Tokens of the longest.
        **kwargs: Options of other kernels, unused here.

    Returns:
        Mixed values [1, T, H, D], and None for the probabilities.
    """
    if cu_seq_lens_q is None:
        function = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return function(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    heads = [x.transpose(1, 2)[0] for x in (query, key, value)]  # [T, H, D]
    if _has_kernel(query, dropout) and max_length_q is not None:
        borders = cu_seq_lens_q.to(torch.int32)
        options = _causal_option() if module.is_causal else {}
        kernel: Any = varlen_attn
        mixed = kernel(*heads, borders, borders, max_length_q, max_length_q, **options)
        return mixed.unsqueeze(0), None
    parts = []
    for number, size in _runs(cu_seq_lens_q.diff().tolist()):
        tokens = number * size
        q, k, v = (x[:tokens].unflatten(0, (number, size)).transpose(1, 2) for x in heads)
        heads = [x[tokens:] for x in heads]
        parts.append(_attend(module, q, k, v, scaling, dropout).flatten(0, 1))
    return torch.cat(parts).unsqueeze(0), None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float
) -> Tensor:
    """[B, H, L, D] to [B, L, H, D]: documents of one length, as the device does it fastest."""
    causal = bool(module.is_causal)
    # sdpa on a CPU has no dropout kernel and makes little use of bfloat16 instructions
    if not is_plain(query) or causal or not (query.dtype == torch.bfloat16 or dropout > 0):
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scaling, is_causal=causal
        )
        return mixed.transpose(1, 2)
    # with dropout, ignore grad mode, so that gradient checkpointing redraws the same mask
    if dropout or torch.is_grad_enabled():
        return eager_attention(module, query, key, value, None, scaling, dropout)[0]
    mixed = torch.empty_like(query.transpose(1, 2))
    for head in range(query.shape[1]):  # scores of one head and CHUNK queries stay in the cache
        k, v = key[:, head : head + 1], value[:, head : head + 1]
        for start in range(0, query.shape[2], CHUNK):
            q = query[:, head : head + 1, start : start + CHUNK]
            part = eager_attention(module, q, k, v, None, scaling)[0]
            mixed[:, start : start + CHUNK, head : head + 1] = part
    return mixed


def _has_kernel(query: Tensor, dropout: float) -> bool:
    half, width = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    fits = half and not dropout and width % 8 == 0 and width <= 256
    if varlen_attn is None or not query.is_cuda or not fits:
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)  # Ampere


def _causal_option() -> dict[str, Any]:
    """How this torch's `varlen_attn` is told to be causal: its signature has changed."""
    names = inspect.signature(varlen_attn).parameters
    return {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}


def _runs(sizes: list[int]) -> list[tuple[int, int]]:
    """Neighbours of equal size as (number, size): one kernel call each."""
    return [(len(list(run)), size) for size, run in groupby(sizes)]


AttentionInterface.register(UNPADDED, unpadded_attention)
AttentionMaskInterface.register(UNPADDED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
