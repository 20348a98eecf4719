"""Checks of arguments that would otherwise change outputs silently, or fail deep inside.

Errors name the argument. Values are checked on a CPU only, because reading them would wait for
another device, and nothing is checked while a model is compiled, exported or transformed.

Legend: B batch, L tokens, S keys, E hidden size, H heads.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .configuration_roformer import RoFormerConfig
from .kernels.dispatch import is_plain, is_traced

Sizes = tuple[int | None, ...]


def check_inputs(
    config: RoFormerConfig,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Any,
    cu_seqlens: Tensor | None,
    cache: Cache | None,
) -> None:
    """Check the arguments of `RoFormerModel.forward` against each other and the configuration.

    Raises:
        ValueError: One line that names the argument.
    """
    if (input_ids is None) == (inputs_embeds is None):
        found = "neither" if input_ids is None else "both"
        raise ValueError(f"exactly one of input_ids and inputs_embeds must be given, got {found}")
    if is_traced():
        return
    if inputs_embeds is not None:
        check_shape("inputs_embeds", inputs_embeds, (None, None, config.embedding_dim))
        B, L = inputs_embeds.shape[:2]  # noqa: N806
    elif input_ids is not None:
        check_shape("input_ids", input_ids, (None, None))
        B, L = input_ids.shape  # noqa: N806
    if position_ids is not None:
        check_shape("position_ids", position_ids, (L,), (1, L), (B, L))
    past_length = 0 if cache is None else int(cache.get_seq_length())
    # a static cache has more keys than tokens, and `generate` makes masks for all of them
    is_static = cache is not None and cache.is_compileable
    _check_mask("attention_mask", attention_mask, config, (B, L, L + past_length), is_static)
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, (B, L), past_length, attention_mask)


def check_encoder(
    config: RoFormerConfig, shape: torch.Size, encoder_hidden_states: Tensor, encoder_mask: Any
) -> None:
    """Check the arguments of the cross-attention; `shape` begins with B and L.

    Raises:
        ValueError: As `check_inputs`.
    """
    if not config.add_cross_attention:
        raise ValueError(
            "encoder_hidden_states must be None without cross-attention, got a tensor; set "
            "is_decoder=True and add_cross_attention=True in the configuration"
        )
    if not is_traced():
        sizes = (*shape[:2], encoder_hidden_states.shape[1])
        _check_mask("encoder_attention_mask", encoder_mask, config, sizes)


def _check_mask(
    name: str, mask: Any, config: RoFormerConfig, sizes: tuple[int, ...], is_static: bool = False
) -> None:
    if not isinstance(mask, Tensor):  # None, or a BlockMask of flex_attention
        return
    (B, L, S), H, shape = sizes, config.num_attention_heads, tuple(mask.shape)  # noqa: N806
    is_4d = len(shape) == 4 and shape[0] in (B, 1) and shape[1] in (1, H) and shape[2] in (L, 1)
    if shape != (B, S) and not (is_4d and (is_static or shape[3] == S)):
        raise ValueError(
            f"{name} must have the shape [{B}, {S}] or [{B} or 1, 1 or {H}, {L} or 1, {S}], got "
            f"{list(shape)}"
        )
    is_checked = len(shape) == 2 and mask.dtype != torch.bool and is_plain(mask)
    if is_checked and ((mask != 0) & (mask != 1)).any():
        raise ValueError(f"{name} must be 0 and 1; scores to be added have four dimensions")


def _check_cu_seqlens(
    cu_seqlens: Tensor, shape: tuple[int, int], past_length: int, attention_mask: Any
) -> None:
    if past_length or getattr(attention_mask, "ndim", 2) == 4:
        raise ValueError("cu_seq_lens_q must be None beside a cache or a four-dimensional mask")
    check_shape("cu_seq_lens_q", cu_seqlens, (None,))
    if not is_plain(cu_seqlens):
        return
    ends, tokens = cu_seqlens.tolist(), shape[0] * shape[1]
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != tokens or ends != sorted(ends):
        raise ValueError(
            f"cu_seq_lens_q must rise from 0 to B * L = {tokens}, the end of every document, got "
            f"{cu_seqlens}"
        )
    unended = sorted(set(range(0, tokens, shape[1])) - set(ends))
    if unended:
        raise ValueError(
            f"cu_seq_lens_q must end a document where a row ends, got none at {unended[0]}; a "
            "document cannot go on in the next row"
        )


def check_shape(name: str, tensor: Any, *allowed: Sizes) -> None:
    """Check that a tensor has one of the shapes.

    Args:
        name: Name of the argument.
        tensor: Its value.
        *allowed: Shapes; None stands for any size.

    Raises:
        ValueError: It is no tensor, or has another shape; names the argument and what was found.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got a {type(tensor).__name__}")
    shape = tuple(tensor.shape)
    for sizes in allowed:
        if len(sizes) == len(shape) and all(a in (None, b) for a, b in zip(sizes, shape)):
            return
    options = " or ".join(str(list(s)).replace("None", "any") for s in dict.fromkeys(allowed))
    raise ValueError(f"{name} must have the shape {options}, got {list(shape)}")


def check_ids(name: str, ids: Tensor, table: nn.Module, remedy: str = "") -> None:
    """Check that each id has a row in its table of embeddings.

    Raises:
        ValueError: An id has none.
    """
    if not isinstance(table, nn.Embedding) or not is_plain(ids) or not ids.numel():
        return
    least, most = ids.aminmax()
    if least < 0 or most >= table.num_embeddings:
        found = int(least if least < 0 else most)
        limit = table.num_embeddings
        raise ValueError(f"{name} must be at least 0 and below {limit}, got {found}{remedy}")
