"""Attention by the fastest exact kernel for the device, dtype, length and dropout of a call.

Registered in transformers' AttentionInterface as `attn_implementation="auto"`, the default of this
package's models, and as "unpadded". No library beyond torch is needed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .conditions import bfloat16_is_emulated, kernels_enabled, may_use_kernel
from .dropout import dropout_unscaled

AUTO = "auto"
"""Default of `attn_implementation`: the fastest exact one for each call; on a CPU padding is left
out, with one warning from `RoFormerModel` where its outputs are 0 there."""

UNPADDED = "unpadded"
"""Value of `attn_implementation` for attention without padding on every device."""

OWN_IMPLEMENTATIONS = (AUTO, UNPADDED)
"""One attention function; they differ in where padding is left out (`prepare_attention`)."""

FULL_SCORES_LIMIT_BYTES = 2**25
"""Scores of so many bytes or more are computed in parts: glibc takes memory of this size from the
system in every call, which clears it page by page."""

_flash_attention: Any = getattr(torch.ops.aten, "_flash_attention_forward", None)
"""torch's private operator, because its public `varlen_attn` has no dropout; None without it."""

CALL_COST = 2**15
"""Scores, of all heads, that take about as long to compute as one more call of attention."""

CHUNK_BYTES = 2**23
"""Maximum size of the scores of a chunk of queries in `_chunked_attention`: smaller chunks were
slower, and larger ones no faster."""

BATCH_SIZE = 2**20
"""Maximum number of scores of a batch of several documents: few enough to stay in the cache."""


def roformer_attention_forward(
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
    """Attention by the fastest exact kernel, within each document of a row if lengths are given.

    - Lengths, and a kernel for them on the device (`has_varlen_kernel`): torch's flash attention.
    - Lengths otherwise: one `_attention` for each batch of documents, which waits for the device.
    - No lengths: one `_attention`.

    `auto` and `unpadded` share this function, and differ only in whether `cu_seq_lens_q` is passed.

    Arguments are those of `eager_attention_forward`, and `is_causal` of the module is read. The
    mask has the form of sdpa's. With `cu_seq_lens_q`, [documents + 1] int32 cumulative lengths of
    the documents, there is no mask, tensors are [1, H, T, D], and `max_length_q` is the length of
    the longest document.

    Returns:
        [B, L, H, D] or [1, T, H, D], and None for the probabilities.
    """
    is_causal = bool(module.is_causal)
    if cu_seq_lens_q is None:
        # sdpa lets query m see the keys up to m, which is wrong behind cached tokens: there several
        # queries come with a mask, and a single one, the newest, sees all keys
        is_causal = is_causal and attention_mask is None and query.shape[2] > 1
        return _attention(query, key, value, attention_mask, scaling, dropout, is_causal), None
    q, k, v = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))  # [T, H, D]
    if max_length_q is not None and has_varlen_kernel(query.device, query.dtype, query.shape[-1]):
        lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        output, *_ = _flash_attention(
            q, k, v, *lengths, dropout, is_causal, return_debug_mask=False, scale=scaling
        )
        return output.unsqueeze(0), None
    return _attention_by_document(q, k, v, cu_seq_lens_q, scaling, dropout, is_causal)[None], None


def _attention_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scaling: float,
    dropout: float,
    is_causal: bool,
) -> Tensor:
    """Attention within each document of a row, [T, H, D], in padded batches of documents."""
    lengths: list[int] = cu_seqlens.diff().tolist()
    batches = batch_documents(lengths, num_heads=query.shape[1])
    shapes = [(len(batch), lengths[batch[0]]) for batch in batches]
    # index of each token in the padded batches, one after the other
    token_indices, size = {}, 0
    for batch, (_, length) in zip(batches, shapes, strict=True):
        for document in batch:
            token_indices[document] = torch.arange(size, size + lengths[document], device="cpu")
            size += length
    in_order = [token_indices[document] for document in range(len(lengths))]
    indices = torch.cat(in_order).to(query.device)
    padded = (
        x.new_zeros(size, *x.shape[1:]).index_copy(0, indices, x) for x in (query, key, value)
    )
    # split, because the gradients of slices would be added up in tensors of the full size
    parts = (x.split([count * length for count, length in shapes]) for x in padded)
    outputs = []
    for batch, shape, *part in zip(batches, shapes, *parts, strict=True):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in part)
        mask = None
        # in causal attention no token sees the padding that follows it
        if lengths[batch[-1]] < shape[1] and not is_causal:
            key_lengths = torch.tensor([lengths[document] for document in batch], device="cpu")
            mask = torch.arange(shape[1], device="cpu") < key_lengths[:, None, None, None]
            mask = mask.to(q.device)
        output = _attention(q, k, v, mask, scaling, dropout, is_causal)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs)[indices]


def batch_documents(lengths: Sequence[int], num_heads: int) -> list[list[int]]:
    """Group documents of similar length, so that padding a batch costs less than another call.

    Returns:
        Indices of the documents of each batch, the longest first.
    """
    batches: list[list[int]] = []
    longest = wasted_scores = 0
    for document in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        wasted_scores += num_heads * (longest**2 - lengths[document] ** 2)
        if (
            batches
            and wasted_scores <= CALL_COST
            and num_heads * longest**2 * (len(batches[-1]) + 1) <= BATCH_SIZE
        ):
            batches[-1].append(document)
        else:
            batches.append([document])
            longest, wasted_scores = lengths[document], 0
    return batches


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    is_causal: bool = False,
) -> Tensor:
    """[B, H, L, D] to [B, L, H, D] by sdpa; on a CPU by the kernel of `select_cpu_attention`.

    Causal attention without dropout is sdpa on a CPU, too: torch leaves out half of the scores.
    """
    is_bfloat16 = query.dtype == torch.bfloat16 and may_use_kernel(query, key, value, mask)
    if is_bfloat16 and bfloat16_is_emulated():
        mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
        q, k, v = query.float(), key.float(), value.float()
        with torch.autocast("cpu", enabled=False):
            return _attention(q, k, v, mask, scaling, dropout, is_causal).bfloat16()
    if (dropout or not is_causal) and may_use_kernel(query, key, value, mask):
        scores_bytes = query.shape[:3].numel() * key.shape[2] * query.element_size()
        selected = select_cpu_attention(query.dtype, dropout, scores_bytes)
        if is_causal and selected != "sdpa":
            shape = query.shape[2], key.shape[2]
            mask = torch.ones(shape, dtype=torch.bool, device="cpu").tril()
        if selected == "full":
            output, _ = softmax_attention(query, key, value, mask, scaling, dropout)
            return output.transpose(1, 2)
        if selected == "chunked":
            return _chunked_attention(query, key, value, mask, scaling, dropout)
    output = F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout, scale=scaling, is_causal=is_causal
    )
    return output.transpose(1, 2)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T scaling) v (equation 2) with the scores of all pairs in memory.

    The mask, True at the keys of a query or added to the scores, is broadcastable to [..., L, S].

    Returns:
        [..., L, D], and the probabilities before dropout, [..., L, S].
    """
    scores = torch.matmul(query * scaling, key.transpose(-1, -2))
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
        if scores.dtype == torch.float16:  # softmax of a row that is all -inf is NaN
            scores = scores.clamp(min=torch.finfo(scores.dtype).min)
    probabilities = F.softmax(scores, dim=-1)
    weights, factor = dropout_unscaled(probabilities, dropout)
    output = torch.matmul(weights, value)
    if factor != 1:  # scaled here, where numbers are fewer than weights
        output = output.mul_(factor)
    return output, probabilities


def _chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
) -> Tensor:
    """The same for some queries of one head at a time, [B, H, L, D] to [B, L, H, D].

    Scores, and the random numbers of dropout, are computed again in the backward pass.
    """
    (B, H, L, _), S = query.shape, key.shape[2]  # noqa: N806
    length = max(1, CHUNK_BYTES // (B * S * query.element_size()))
    masks = [None] * H if mask is None else mask.expand(B, H, L, S).unbind(1)
    heads = []
    for q, k, v, head_mask in zip(*(x.unbind(1) for x in (query, key, value)), masks, strict=True):
        chunks = []
        for start in range(0, L, length):
            rows = slice(start, start + length)
            mask = None if head_mask is None else head_mask[:, rows]
            arguments = (q[:, rows], k, v, mask, scaling, dropout)
            if torch.is_grad_enabled():
                output = checkpoint(softmax_attention, *arguments, use_reentrant=False)[0]
            else:
                output = softmax_attention(*arguments)[0]
            chunks.append(output)
        heads.append(torch.cat(chunks, dim=1))
    return torch.stack(heads, dim=2)


def select_cpu_attention(dtype: torch.dtype, dropout: float, scores_bytes: int) -> str:
    """Return the kernel for a call on a CPU by the dtype of queries, keys and values.

    `full` computes all scores at once, `chunked` some queries of one head at a time, and `sdpa` is
    torch's kernel, which makes little use of bfloat16 instructions and has no dropout on a CPU:
    there it computes and keeps all scores.

    It is the same whether gradients are computed or not. On a CPU that emulates bfloat16, calls in
    bfloat16 are converted to float32 before this choice.
    """
    if dtype == torch.float16 or (dtype != torch.bfloat16 and not dropout):
        return "sdpa"
    return "full" if scores_bytes < FULL_SCORES_LIMIT_BYTES else "chunked"


def has_varlen_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether one call computes documents of different lengths on the device."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    if not kernels_enabled() or _flash_attention is None or device.type != "cuda" or not is_half:
        return False
    if head_dim % 8 or head_dim > 256:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere


for _name in OWN_IMPLEMENTATIONS:
    AttentionInterface.register(_name, roformer_attention_forward)
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
