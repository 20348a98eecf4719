"""The cache of a decoder's forward pass: which kind, and where none can be used."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from .configuration_roformer import RoFormerConfig
from .linear_attention import LinearAttentionCache


def prepare_cache(
    past_key_values: Any, use_cache: bool | None, config: RoFormerConfig, has_encoder: bool
) -> Cache | None:
    """Check the given cache, or create one for the next call if there is none.

    Raises:
        ValueError: The model is no decoder, or its encoding cannot use such a cache.
    """
    if past_key_values is not None:
        _check_cache(past_key_values, config)
        return past_key_values
    if not (use_cache and config.is_decoder):
        return None
    if config.linear_attention is not None:
        return LinearAttentionCache()
    cache = DynamicCache(config=config)
    return EncoderDecoderCache(cache, DynamicCache(config=config)) if has_encoder else cache


def _check_cache(cache: Any, config: RoFormerConfig) -> None:
    kind = type(cache).__name__
    if not (isinstance(cache, Cache) and config.is_decoder):
        found = kind if config.is_decoder else "a cache in an encoder"
        raise ValueError(
            f"past_key_values must be a transformers Cache of a decoder, got {found}; set "
            "is_decoder=True, or leave it out"
        )
    if config.has_position_bias and cache.is_compileable:
        raise ValueError(
            "past_key_values must be a cache that grows, because position_encoding "
            f"{config.position_encoding} has a position bias, got a {kind}; leave "
            "cache_implementation out"
        )
    if config.has_dynamic_rope:
        raise ValueError(
            "past_key_values must be None where the rotation depends on the length, because "
            "cached keys were rotated for a shorter row, got a cache; set use_cache=False"
        )
    if config.linear_attention is not None and not isinstance(cache, LinearAttentionCache):
        raise ValueError(
            "past_key_values must be a LinearAttentionCache with linear_attention, got a "
            f"{kind}; leave it out"
        )


def cache_of_packed_rows(
    cache: Cache, cache_given: bool, cu_seqlens: Tensor | None
) -> Cache | None:
    """Drop the cache of packed rows, whose next token would belong to no known document.

    A cache that the caller gave is a ValueError instead.

    While compiling any row may be packed by its positions, which are not known: then the cache
    stays.
    """
    if cache_given:
        name = "position_ids" if cu_seqlens is None else "cu_seq_lens_q"
        raise ValueError(
            f"{name} must hold one document beside past_key_values, got several; leave the cache "
            "out"
        )
    is_known = cu_seqlens is not None or not torch.compiler.is_compiling()
    return None if is_known or isinstance(cache, LinearAttentionCache) else cache
