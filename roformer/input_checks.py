"""Checks of the arguments of a forward pass: shapes, dtypes and ids; errors name the argument.

Values are checked on a CPU only, because reading them would wait for another device. While a model
is compiled, exported or transformed, only which arguments are given is checked.

Legend: B batch, L tokens, S keys, E hidden size, H heads.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache

from .configuration_roformer import RoFormerConfig
from .kernels.conditions import is_plain, is_traced

Sizes = tuple[int | None, ...]
INTEGERS = (torch.int64, torch.int32)


def check_fixed_fields(config: RoFormerConfig, fixed_fields: dict[str, Any]) -> None:
    """Raise a ValueError if a field which the layers were built from has been edited."""
    for name, value in fixed_fields.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"config.{name} must stay {value} in a built model, got {getattr(config, name)!r}; "
                "give it to from_pretrained, or copy the configuration for each model"
            )


def check_inputs(
    config: RoFormerConfig,
    word_embeddings: nn.Module,
    input_ids: Tensor | None,
    attention_mask: Any,
    token_type_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    cross_inputs: tuple[Tensor | None, Tensor | None],
    cache: Cache | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Check the arguments of `RoFormerModel.forward`, in its order, against each other.

    `word_embeddings` is the table of word embeddings, and `cross_inputs` are
    `encoder_hidden_states` and `encoder_attention_mask`.

    Raises:
        ValueError: One line that names the argument.
    """
    if (input_ids is None) == (inputs_embeds is None):
        found = "neither" if input_ids is None else "both"
        raise ValueError(f"exactly one of input_ids and inputs_embeds must be given, got {found}")
    encoder_hidden_states, encoder_attention_mask = cross_inputs
    if encoder_hidden_states is None and encoder_attention_mask is not None:
        raise ValueError(
            "encoder_attention_mask must be None without encoder_hidden_states, got a mask"
        )
    if encoder_hidden_states is not None and not config.add_cross_attention:
        raise ValueError(
            "encoder_hidden_states must be None without cross-attention, got a tensor; set "
            "is_decoder=True and add_cross_attention=True in the configuration"
        )
    if is_traced():
        return
    num_embeddings = getattr(word_embeddings, "num_embeddings", config.vocab_size)
    B, L = _check_tokens(config, num_embeddings, input_ids, inputs_embeds)  # noqa: N806
    if token_type_ids is not None:
        check_shape("token_type_ids", token_type_ids, (B, L), (1, L))
        check_ids("token_type_ids", token_type_ids, max(config.type_vocab_size, 1))
    if position_ids is not None:
        check_shape("position_ids", position_ids, (L,), (1, L), (B, L))
        if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
            raise ValueError(f"position_ids must be integers, got {position_ids.dtype}")
    _check_masks(config, (B, L), cache, attention_mask, cu_seqlens)
    if encoder_hidden_states is not None:
        check_shape("encoder_hidden_states", encoder_hidden_states, (B, None, config.hidden_size))
        sizes = (B, L, encoder_hidden_states.shape[1])
        _check_mask("encoder_attention_mask", encoder_attention_mask, config, sizes)


def _check_tokens(
    config: RoFormerConfig, num_embeddings: int, input_ids: Any, inputs_embeds: Any
) -> tuple[int, int]:
    if inputs_embeds is None:
        check_shape("input_ids", input_ids, (None, None))
        check_ids("input_ids", input_ids, num_embeddings)
        name, (B, L) = "input_ids", input_ids.shape  # noqa: N806
    else:
        check_shape("inputs_embeds", inputs_embeds, (None, None, config.embedding_dim))
        name, (B, L, _) = "inputs_embeds", inputs_embeds.shape  # noqa: N806
    if 0 in (B, L):
        raise ValueError(f"{name} must hold at least one token, got shape {[B, L]}")
    return B, L


def _check_masks(
    config: RoFormerConfig,
    rows: tuple[int, int],
    cache: Cache | None,
    attention_mask: Any,
    cu_seqlens: Tensor | None,
) -> None:
    past_length = 0 if cache is None else int(cache.get_seq_length())
    if not isinstance(attention_mask, BlockMask):
        # a static cache has more keys than tokens, and `generate` makes masks for all of them
        is_static = cache is not None and cache.is_compileable
        sizes = (*rows, rows[1] + past_length)
        _check_mask("attention_mask", attention_mask, config, sizes, is_static)
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, rows, past_length, attention_mask)


def _check_mask(
    name: str,
    mask: Any,
    config: RoFormerConfig,
    sizes: tuple[int, int, int],
    is_static: bool = False,
) -> None:
    _check_tensor(name, mask)
    if mask is None:
        return
    (B, L, S), H = sizes, config.num_attention_heads  # noqa: N806
    shape = tuple(mask.shape)
    is_4d = len(shape) == 4 and shape[0] in (B, 1) and shape[1] in (1, H) and shape[2] in (L, 1)
    if shape != (B, S) and not (is_4d and (is_static or shape[3] == S)):
        raise ValueError(
            f"{name} must have the shape [{B}, {S}] or [{B} or 1, 1 or {H}, {L} or 1, {S}], got "
            f"{list(shape)}"
        )
    if mask.dtype == torch.bool or not is_plain(mask, "cpu"):
        return
    if len(shape) == 4 and mask.is_floating_point():
        if mask.max() == 1 and ((mask == 0) | (mask == 1)).all():
            raise ValueError(
                f"{name} must be added to the scores if it is a float in four dimensions, got 0 "
                "and 1 only; use mask.bool()"
            )
        return
    other = mask[(mask != 0) & (mask != 1)]
    if len(other):
        raise ValueError(
            f"{name} must be 0 and 1, got {other[0].item():g}; scores to be added are floats in "
            "four dimensions"
        )


def _check_cu_seqlens(
    cu_seqlens: Tensor, shape: tuple[int, int], past_length: int, attention_mask: Any
) -> None:
    if past_length or getattr(attention_mask, "ndim", 2) == 4:
        found = f"a cache of {past_length} tokens" if past_length else "such a mask"
        raise ValueError(
            f"cu_seq_lens_q must be None beside a cache or a four-dimensional mask, got {found}"
        )
    check_shape("cu_seq_lens_q", cu_seqlens, (None,))
    if cu_seqlens.dtype not in INTEGERS:
        raise ValueError(f"cu_seq_lens_q must be int32 or int64, got {cu_seqlens.dtype}")
    if not is_plain(cu_seqlens, "cpu"):
        return
    ends, tokens = cu_seqlens.tolist(), shape[0] * shape[1]
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != tokens or ends != sorted(ends):
        shown = str(ends) if len(ends) < 9 else f"[{ends[0]}, {ends[1]}, ..., {ends[-1]}]"
        raise ValueError(
            f"cu_seq_lens_q must rise from 0 to B * L = {tokens}, got {shown}; give the end of "
            "every document"
        )
    unended = sorted(set(range(0, tokens, shape[1])) - set(ends))
    if unended:
        raise ValueError(
            f"cu_seq_lens_q must end a document where a row ends, got none at {unended[0]}; a "
            "document cannot go on in the next row"
        )


def check_one_document_a_row(kwargs: Mapping[str, Any]) -> None:
    """Raise a ValueError for packed rows, of which a head would read the first document alone.

    Only packing by `cu_seq_lens_q` is noticed.
    """
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError(
            "cu_seq_lens_q must be None for a head that reads one token of each row, got packed "
            "documents; give each a row"
        )


def check_shape(name: str, tensor: Tensor, *allowed: Sizes) -> None:
    """Check that an argument is a tensor of one of the shapes, where None stands for any size.

    Raises:
        ValueError: It is no tensor, or has another shape; names the argument and what was found.
    """
    _check_tensor(name, tensor)
    if is_traced():
        return
    shape = tuple(tensor.shape)
    for sizes in allowed:
        if len(sizes) == len(shape) and all(a in (None, b) for a, b in zip(sizes, shape)):
            return
    options = " or ".join(str(list(s)).replace("None", "any") for s in dict.fromkeys(allowed))
    raise ValueError(f"{name} must have the shape {options}, got {list(shape)}")


def _check_tensor(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, Tensor):
        remedy = "call model(**batch)" if isinstance(value, Mapping) else "wrap it in torch.tensor"
        raise ValueError(f"{name} must be a tensor, got a {type(value).__name__}; {remedy}")


def check_ids(name: str, ids: Tensor, size: int, remedy: str = "") -> None:
    """Check ids against the number of rows of their table.

    Raises:
        ValueError: An id is no integer or has no row.
    """
    if ids.dtype not in INTEGERS:
        raise ValueError(f"{name} must be int32 or int64, got {ids.dtype}")
    if not is_plain(ids, "cpu") or not ids.numel():
        return
    least, most = ids.aminmax()
    if least < 0 or most >= size:
        found = int(least if least < 0 else most)
        raise ValueError(f"{name} must be at least 0 and below {size}, got {found}{remedy}")
