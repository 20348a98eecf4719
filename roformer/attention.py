"""Softmax attention: queries, keys and values in, mixed values out.

Fused kernels come from transformers' AttentionInterface by the name in `attn_implementation`; the
plain form below is what they are measured against, and the only one that returns probabilities.
Other mechanisms (linear attention) belong in this file too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


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
        module: The attention layer; only its training flag is read.
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
    probabilities = F.softmax(scores, dim=-1)
    dropped = F.dropout(probabilities, dropout, module.training) if dropout else probabilities
    return torch.matmul(dropped, value).transpose(1, 2), probabilities


def attend(
    module: nn.Module, implementation: str, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention through the kernel of that name; arguments as `eager_attention`."""
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
    output, probabilities = function(module, *args, **kwargs)
    return output, probabilities
