"""Checks of the arguments of a forward pass: shapes, dtypes and ids; errors name the argument.

Values are checked on a CPU only, because reading them would wait for another device. While a model
is compiled, exported or transformed, only which arguments are given is checked.

Legend: B batch, L tokens.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache

from .configuration_roformer import RoFormerConfig
from .kernels.conditions import is_plain_on, is_traced


def check_inputs(
    config: RoFormerConfig,
    word_embeddings: nn.Module,
    *,
    input_ids: Any,
    attention_mask: Any,
    token_type_ids: Any,
    inputs_embeds: Any,
    encoder_hidden_states: Tensor | None,
    encoder_attention_mask: Any,
    cache: Cache | None,
    position_ids: Any,
    cu_seqlens: Any,
    is_causal: bool | None,
) -> None:
    """Check the arguments of `RoFormerModel.forward` against each other and the configuration.

    Raises:
        ValueError: One line that names the argument.
    """
    _check_given(config, input_ids, inputs_embeds, encoder_hidden_states, cache, is_causal)
    if is_traced():
        return
    if inputs_embeds is None:
        check_shape("input_ids", input_ids, (None, None))
        vocab_size = getattr(word_embeddings, "num_embeddings", config.vocab_size)
        check_ids("input_ids", input_ids, vocab_size)
    else:
        check_shape("inputs_embeds", inputs_embeds, (None, None, config.embedding_dim))
    B, L = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]  # noqa: N806
    if token_type_ids is not None:
        check_shape("token_type_ids", token_type_ids, (B, L), (1, L))
        check_ids("token_type_ids", token_type_ids, max(config.type_vocab_size, 1))
    past_length = 0 if cache is None else int(cache.get_seq_length())
    if position_ids is not None:
        check_shape("position_ids", position_ids, (L,), (1, L), (B, L))
    _check_positions(position_ids, cu_seqlens, L + past_length, config)
    heads = config.num_attention_heads
    if attention_mask is not None:
        _check_mask("attention_mask", attention_mask, (B, heads, L, L + past_length), cache)
    if encoder_hidden_states is not None and encoder_attention_mask is not None:
        keys = encoder_hidden_states.shape[1]
        _check_mask("encoder_attention_mask", encoder_attention_mask, (B, heads, L, keys))
    if cu_seqlens is not None:
        check_shape("cu_seq_lens_q", cu_seqlens, (None,))
        if is_plain_on(cu_seqlens, "cpu"):
            _check_cu_seqlens(cu_seqlens.tolist(), B * L, L)


def _check_given(
    config: RoFormerConfig,
    input_ids: Any,
    inputs_embeds: Any,
    encoder_hidden_states: Any,
    cache: Cache | None,
    is_causal: bool | None,
) -> None:
    """Check which arguments are given."""
    if (input_ids is None) == (inputs_embeds is None):
        found = "neither" if input_ids is None else "both"
        raise ValueError(f"exactly one of input_ids and inputs_embeds must be given, got {found}")
    if encoder_hidden_states is not None and not config.add_cross_attention:
        raise ValueError(
            "encoder_hidden_states must be None without cross-attention, got a tensor; set "
            "is_decoder=True and add_cross_attention=True in the configuration"
        )
    if is_causal not in (None, config.is_decoder):
        raise ValueError(
            f"is_causal must be config.is_decoder, {config.is_decoder}, got {is_causal}; leave it "
            "out, also in the configuration"
        )
    if cache is not None:
        check_cache(cache, config)


def _check_positions(
    position_ids: Tensor | None, cu_seqlens: Tensor | None, length: int, config: RoFormerConfig
) -> None:
    """Check given positions, or that default ones, which count the tokens, have enough rows."""
    if position_ids is not None:
        if position_ids.is_floating_point():
            raise ValueError(f"position_ids must be integers, got {position_ids.dtype}")
        return
    limit = config.max_position_embeddings
    if config.has_position_limit and cu_seqlens is None and length > limit:
        raise ValueError(
            f"inputs must have at most max_position_embeddings = {limit} tokens with "
            f"position_encoding learned, got {length}; truncate them"
        )


def _check_cu_seqlens(ends: list[int], tokens: int, row_length: int) -> None:
    """Check that documents fill all rows, each of which ends one."""
    is_valid = ends[:1] == [0] and ends[-1] == tokens and ends == sorted(ends)
    if not is_valid or {*range(0, tokens, row_length)} - {*ends}:
        shown = str(ends) if len(ends) < 9 else f"[{ends[0]}, {ends[1]}, ..., {ends[-1]}]"
        raise ValueError(
            f"cu_seq_lens_q must rise from 0 to B * L = {tokens} over the end of every row of "
            f"{row_length} tokens, got {shown}; give the end of every document"
        )


def _check_mask(
    name: str, mask: Any, scores: tuple[int, int, int, int], cache: Cache | None = None
) -> None:
    """Check a padding mask, or one for attention scores of the given shape.

    Those of flex_attention are used as they are.
    """
    if isinstance(mask, BlockMask):
        return
    B, H, L, S = scores  # noqa: N806
    if getattr(mask, "ndim", 2) == 4:
        is_static = cache is not None and cache.is_compileable  # has more keys than tokens
        keys = None if is_static else S
        check_shape(name, mask, *itertools.product((B, 1), (H, 1), (L, 1), (keys,)))
        return
    check_shape(name, mask, (B, S))
    if mask.dtype == torch.bool or not is_plain_on(mask, "cpu"):
        return
    other = mask[(mask != 0) & (mask != 1)]
    if len(other):
        raise ValueError(
            f"{name} must be 0 and 1, got {other[0].item():g}; scores to be added are floats "
            "in four dimensions"
        )


def check_cache(cache: Cache, config: RoFormerConfig) -> None:
    """Check the cache that a decoder was given.

    Raises:
        ValueError: The attention or the position encoding cannot use such a cache.
    """
    if not config.has_cache:
        raise ValueError(
            "past_key_values must be None with linear_attention and with rope_type dynamic, "
            f"got a {type(cache).__name__}; leave it out, and in generate set use_cache=False"
        )
    if config.has_position_bias and cache.is_compileable:
        raise ValueError(
            "past_key_values must be a cache that grows, because position_encoding "
            f"{config.position_encoding} has a position bias, got a {type(cache).__name__}; leave "
            "cache_implementation out"
        )


def check_generation(model_kwargs: dict[str, Any]) -> None:
    """Check the arguments of `generate` where the whole text is computed for each token.

    Raises:
        ValueError: There are vectors, which `generate` passes on with the first token only.
    """
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds must be None in generate without a cache, got vectors; use input_ids"
        )


def one_document_per_row(
    cu_seq_lens_q: Any, position_ids: Tensor | None, rows: Tensor | None
) -> dict[str, Any]:
    """Return arguments of `RoFormerModel` by which each row is one document.

    For heads that read one token of each row [B, L, ...]. The positions of a single row may be read
    as several documents.

    Raises:
        ValueError: There are document lengths.
    """
    if cu_seq_lens_q is not None:
        raise ValueError(
            "cu_seq_lens_q must be None for a head on one token of a row, got document lengths; "
            "give each document a row"
        )
    if position_ids is None or rows is None or len(rows) > 1:
        return {}
    return {"cu_seq_lens_q": torch.tensor([0, rows.shape[1]]), "max_length_q": rows.shape[1]}


def check_shape(name: str, tensor: Tensor, *allowed: tuple[int | None, ...]) -> None:
    """Check that an argument is a tensor of one of the shapes, where None stands for any size.

    Raises:
        ValueError: It is no tensor, or has another shape; names the argument and what was found.
    """
    if not isinstance(tensor, Tensor):
        remedy = "call model(**batch)" if isinstance(tensor, Mapping) else "wrap it in torch.tensor"
        raise ValueError(f"{name} must be a tensor, got a {type(tensor).__name__}; {remedy}")
    shape = tuple(tensor.shape)
    for sizes in allowed:
        if len(sizes) == len(shape) and all(a in (None, b) for a, b in zip(sizes, shape)):
            return
    options = " or ".join(str(list(s)).replace("None", "any") for s in dict.fromkeys(allowed))
    raise ValueError(f"{name} must have the shape {options}, got {list(shape)}")


def check_ids(name: str, ids: Tensor, size: int) -> None:
    """Check ids against the number of rows of their table.

    Raises:
        ValueError: An id has no row, or is no integer.
    """
    if not is_plain_on(ids, "cpu") or not ids.numel():
        return
    if ids.is_floating_point():
        raise ValueError(f"{name} must be integers, got {ids.dtype}")
    least, most = ids.aminmax()
    if least < 0 or most >= size:
        found = int(least if least < 0 else most)
        raise ValueError(f"{name} must be at least 0 and below {size}, got {found}")
