"""What a call may be given: shapes, dtypes and ids, refused in one line that names the argument.

Values are looked at on a CPU only, because to look is to wait for another device, and nothing is
looked at while a model is compiled, exported or transformed. Legend: B batch, L tokens, S keys, E
width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache

from .configuration_roformer import RoFormerConfig
from .kernels.dispatch import is_plain, is_traced

Sizes = tuple[int | None, ...]
INTEGERS = (torch.int64, torch.int32)


def check_tokens(
    config: RoFormerConfig,
    size: int,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
) -> None:
    """Refuse tokens that contradict each other or the configuration.

    Args:
        config: Of the model.
        size: Rows of the word embeddings, which may have been resized since.
        input_ids: As `RoFormerModel.forward`, like the rest.
        inputs_embeds: Likewise.
        token_type_ids: Likewise.
        position_ids: Likewise.

    Raises:
        ValueError: As the module says.
    """
    if (input_ids is None) == (inputs_embeds is None):
        found = "neither" if input_ids is None else "both"
        raise ValueError(f"exactly one of input_ids and inputs_embeds must be given, got {found}")
    if is_traced():
        return
    given = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    given |= {"token_type_ids": token_type_ids, "position_ids": position_ids}
    for name, value in given.items():
        _require_tensor(name, value)
    rows: tuple[int, ...] = ()
    if inputs_embeds is not None:
        require_shape("inputs_embeds", inputs_embeds, (None, None, config.embedding_dim))
        rows = tuple(inputs_embeds.shape[:2])
    if input_ids is not None:
        require_shape("input_ids", input_ids, (None, None))
        _require_ids("input_ids", input_ids, size)
        rows = tuple(input_ids.shape)
    if 0 in rows:
        name = "inputs_embeds" if input_ids is None else "input_ids"
        raise ValueError(f"{name} must hold at least one token, got shape {list(rows)}")
    if token_type_ids is not None:
        require_shape("token_type_ids", token_type_ids, rows, (1, rows[1]))
        _require_ids("token_type_ids", token_type_ids, max(config.type_vocab_size, 1))
    if position_ids is not None:
        require_shape("position_ids", position_ids, (rows[1],), (1, rows[1]), rows)
        if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
            raise ValueError(f"position_ids must be integers, got {position_ids.dtype}")


def check_positions(config: RoFormerConfig, positions: Tensor) -> None:
    """Refuse positions beyond a table of learned ones.

    Args:
        config: Of the model.
        positions: [1 or B, L].

    Raises:
        ValueError: As the module says.
    """
    if is_traced() or not config.has_position_limit:
        return
    if is_plain(positions) and positions.numel():
        first, last = int(positions.min()), int(positions.max())
        rows = config.max_position_embeddings
        if first < 0 or last >= rows:
            raise ValueError(
                f"position_ids must be in the {rows} rows of the table of learned positions, "
                f"got {first if first < 0 else last}; shorten the text, or use a "
                "position_encoding without a table"
            )


def check_masks(
    config: RoFormerConfig,
    words: Tensor,
    cache: Cache | None,
    attention_mask: Any,
    borders: Tensor | None,
) -> None:
    """Refuse masks and borders of documents that do not fit the tokens.

    Args:
        config: Of the model.
        words: [B, L] or [B, L, E].
        cache: Keys and values of earlier tokens.
        attention_mask: As `RoFormerModel.forward`.
        borders: Its `cu_seq_lens_q`.

    Raises:
        ValueError: As the module says.
    """
    if is_traced():
        return
    B, L = words.shape[:2]  # noqa: N806
    start = 0 if cache is None else int(cache.get_seq_length())
    if not isinstance(attention_mask, BlockMask):
        # a cache of fixed size has more keys than tokens, and `generate` makes masks for them all
        fixed = cache is not None and cache.is_compileable
        _check_mask("attention_mask", attention_mask, config, (B, L, L + start), fixed)
    if borders is not None:
        _check_borders(borders, (B, L), start, attention_mask)


def _check_mask(
    name: str, mask: Any, config: RoFormerConfig, sizes: tuple[int, int, int], fixed: bool = False
) -> None:
    _require_tensor(name, mask)
    if mask is None:
        return
    (B, L, S), H = sizes, config.num_attention_heads  # noqa: N806
    shape = tuple(mask.shape)
    ready = len(shape) == 4 and shape[0] in (B, 1) and shape[1] in (1, H) and shape[2] in (L, 1)
    if shape != (B, S) and not (ready and (fixed or shape[3] == S)):
        raise ValueError(
            f"{name} must have the shape [{B}, {S}] or [{B} or 1, 1 or {H}, {L} or 1, {S}], got "
            f"{list(shape)}"
        )
    summed = len(shape) == 4 and mask.is_floating_point()  # added to scores, as it is
    if mask.dtype == torch.bool or summed or not is_plain(mask):
        return
    other = mask[(mask != 0) & (mask != 1)]
    if len(other):
        raise ValueError(
            f"{name} must be 0 and 1, got {other[0].item():g}; scores to be added are floats in "
            "four dimensions"
        )


def _check_borders(
    borders: Tensor, shape: tuple[int, int], start: int, attention_mask: Any
) -> None:
    if start or getattr(attention_mask, "ndim", 2) == 4:
        found = f"a cache of {start} tokens" if start else "a ready-made mask"
        raise ValueError(f"cu_seq_lens_q must be None beside a cache or such a mask, got {found}")
    require_shape("cu_seq_lens_q", borders, (None,))
    if borders.dtype not in INTEGERS:
        raise ValueError(f"cu_seq_lens_q must be int32 or int64, got {borders.dtype}")
    if not is_plain(borders):
        return
    ends, tokens = borders.tolist(), shape[0] * shape[1]
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != tokens or ends != sorted(ends):
        shown = str(ends) if len(ends) < 9 else f"[{ends[0]}, {ends[1]}, ..., {ends[-1]}]"
        raise ValueError(
            f"cu_seq_lens_q must rise from 0 to B * L = {tokens}, got {shown}; give the end of "
            "every document"
        )
    crossed = sorted(set(range(0, tokens, max(1, shape[1]))) - set(ends))
    if crossed:
        raise ValueError(
            f"cu_seq_lens_q must end a document where a row ends, got none at {crossed[0]}; a "
            "document cannot go on in the next row"
        )


def check_source(
    config: RoFormerConfig, words: Tensor, states: Tensor | None, attention_mask: Tensor | None
) -> None:
    """Refuse what a cross-attention cannot read.

    Args:
        config: Of the decoder.
        words: [B, L] ids, or [B, L, E'] embeddings.
        states: `encoder_hidden_states`.
        attention_mask: `encoder_attention_mask`.

    Raises:
        ValueError: As the module says.
    """
    if states is None:
        if attention_mask is not None:
            raise ValueError(
                "encoder_attention_mask must be None without encoder_hidden_states, got a mask; "
                "give arguments after the third by name, for stock's order is another"
            )
        return
    if not config.add_cross_attention:
        raise ValueError(
            "encoder_hidden_states must be None without cross-attention, got a tensor; set "
            "is_decoder=True and add_cross_attention=True in the configuration"
        )
    if is_traced():
        return
    B, L = words.shape[:2]  # noqa: N806
    require_shape("encoder_hidden_states", states, (B, None, config.hidden_size))
    _check_mask("encoder_attention_mask", attention_mask, config, (B, L, states.shape[1]))


def require_shape(name: str, tensor: Tensor, *allowed: Sizes) -> None:
    """Refuse a tensor that has none of the shapes; None stands for any size.

    Raises:
        ValueError: It names the argument, the shapes and the one found.
    """
    if is_traced():
        return
    shape = tuple(tensor.shape)
    for sizes in allowed:
        if len(sizes) == len(shape) and all(a in (None, b) for a, b in zip(sizes, shape)):
            return
    options = " or ".join(str(list(s)).replace("None", "any") for s in dict.fromkeys(allowed))
    raise ValueError(f"{name} must have the shape {options}, got {list(shape)}")


def _require_tensor(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, Tensor):
        kind = type(value).__name__
        raise ValueError(f"{name} must be a tensor, got a {kind}; wrap it in torch.tensor")


def _require_ids(name: str, ids: Tensor, size: int) -> None:
    if ids.dtype not in INTEGERS:
        raise ValueError(f"{name} must be int32 or int64, got {ids.dtype}")
    if not is_plain(ids) or not ids.numel():
        return
    least, most = ids.aminmax()
    if least < 0 or most >= size:
        found = int(least if least < 0 else most)
        raise ValueError(f"{name} must be at least 0 and below {size}, got {found}")
