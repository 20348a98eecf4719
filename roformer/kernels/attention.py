"""Attention without padding: all documents of a batch as one row of tokens.

Registered in transformers' AttentionInterface as `attn_implementation="unpadded"`. No arithmetic is
spent on padding, and no library beyond torch is needed.
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

from .dispatch import UNPADDED, use_cpu_kernel
from .dropout import dropout as fast_dropout

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # older torch: the loop below serves every device
    varlen_attn = None  # type: ignore[assignment]

CHUNK_LENGTH = 512
"""Queries of one head whose scores are computed at a time in inference on a CPU."""


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
    """Attention within each document of one row; without document lengths the same as sdpa.

    On CUDA (Ampere or later), in half precision, without dropout and with a head size that is a
    multiple of 8 up to 256, this is torch's `varlen_attn`. Elsewhere it is one call for each run of
    neighbouring documents of equal length.

    Args:
        module: Attention layer; `is_causal` is read.
        query: [1, H, T, D].
        key: [1, H, T, D].
        value: [1, H, T, D].
        attention_mask: Only used without `cu_seq_lens_q`.
        scaling: Factor on the scores; 1 / sqrt(D) for `varlen_attn`.
        dropout: Probability of dropping an attention weight.
        cu_seq_lens_q: [documents + 1] int32, cumulative lengths of the documents.
        max_length_q: Length of the longest document.
        **kwargs: Options of other kernels, unused.

    Returns:
        [1, T, H, D], and None for the probabilities.
    """
    if cu_seq_lens_q is None:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    is_causal = bool(module.is_causal)
    q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))  # [T, H, D]
    if max_length_q is not None and _has_varlen_kernel(query, dropout):
        cu_seqlens = cu_seq_lens_q.to(torch.int32)
        lengths: Any = (cu_seqlens, cu_seqlens, max_length_q, max_length_q)
        kernel: Any = varlen_attn
        output = kernel(q, k, v, *lengths, **(_causal_option() if is_causal else {}))
        return output.unsqueeze(0), None
    outputs, start = [], 0
    for length, run in groupby(cu_seq_lens_q.diff().tolist()):
        shape = (len(list(run)), length)
        end = start + shape[0] * length
        rows = [x[start:end].unflatten(0, shape).transpose(1, 2) for x in (q, k, v)]
        output = _batched_attention(rows[0], rows[1], rows[2], scaling, dropout, is_causal)
        outputs.append(output.flatten(0, 1))
        start = end
    return torch.cat(outputs).unsqueeze(0), None


def _batched_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float, is_causal: bool
) -> Tensor:
    """Unmasked or causal attention, [B, H, L, D] to [B, L, H, D].

    On a CPU:

    | dtype, dropout | without gradients | with gradients |
    |---|---|---|
    | causal, or not bfloat16 and no dropout | sdpa | sdpa |
    | bfloat16, no dropout | in chunks of queries | scores of all pairs |
    | dropout | scores of all pairs | scores of all pairs |
    """
    # sdpa on a CPU has no dropout kernel and makes little use of bfloat16 instructions
    is_slow = query.dtype == torch.bfloat16 or dropout > 0
    if is_causal or not is_slow or not use_cpu_kernel(query):
        output = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scaling, is_causal=is_causal
        )
        return output.transpose(1, 2)
    # with dropout, ignore grad mode, so that gradient checkpointing redraws the same mask
    if dropout or torch.is_grad_enabled():
        return _full_attention(query, key, value, scaling, dropout)
    return _chunked_attention(query, key, value, scaling)


def _full_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0
) -> Tensor:
    """Softmax(q k^T scaling) v with the scores of all pairs in memory."""
    scores = torch.matmul(query * scaling, key.transpose(-1, -2))
    weights = fast_dropout(F.softmax(scores, dim=-1), dropout, training=True)
    return torch.matmul(weights, value).transpose(1, 2)


def _chunked_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The same for some queries of one head at a time, whose scores stay in the cache."""
    output = torch.empty_like(query.transpose(1, 2))
    for h in range(query.shape[1]):
        head = slice(h, h + 1)
        for start in range(0, query.shape[2], CHUNK_LENGTH):
            rows = slice(start, start + CHUNK_LENGTH)
            chunk = query[:, head, rows]
            output[:, rows, head] = _full_attention(chunk, key[:, head], value[:, head], scaling)
    return output


def _has_varlen_kernel(query: Tensor, dropout: float) -> bool:
    is_half, head_dim = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    if varlen_attn is None or not query.is_cuda or not is_half or dropout:
        return False
    if head_dim % 8 or head_dim > 256:
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)  # Ampere


def _causal_option() -> dict[str, Any]:
    """The argument of `varlen_attn` for causal attention, which differs between versions."""
    names = inspect.signature(varlen_attn).parameters
    return {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}


AttentionInterface.register(UNPADDED, unpadded_attention)
AttentionMaskInterface.register(UNPADDED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
