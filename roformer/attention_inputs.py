"""Choose the attention implementation of a call, and build its mask or document lengths.

Legend: B batch, L columns of a row, padding included, S keys, H heads.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    packed_sequence_mask_function,
)
from transformers.utils import logging

from .batch import BatchMetadata, Layout, remove_padding, split_documents
from .configuration_roformer import RoFormerConfig
from .kernels import AUTO, kernels_enabled
from .kernels.attention import OWN_IMPLEMENTATIONS
from .kernels.conditions import can_read_values, has_hooks, is_plain_on, is_traced

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class AttentionInputs:
    """How the layers of a forward pass attend.

    Attributes:
        implementation: Name of the attention implementation; linear attention does not read it.
        attention_mask: Mask in the form of the implementation, or None.
        layout: Rows that the tokens are rearranged into for all layers, or None; always None for
            encodings with a position bias.
        attention_kwargs: Further keyword arguments of the attention function.
        encoder_attention_mask: Mask of the cross-attention, in the same form.
    """

    implementation: str
    attention_mask: Any
    layout: Layout | None = None
    attention_kwargs: dict[str, Any] = field(default_factory=dict)
    encoder_attention_mask: Any = None

    def to_layout(self, x: Tensor) -> Tensor:
        """Rearrange [B, L, ...], or [1, L, ...] for all rows, into the rows of the layout."""
        if self.layout is None:
            return x
        return self.layout.to_layout(x.expand(self.layout.batch_shape[0], *x.shape[1:]))

    def to_batch(self, hidden_states: Tensor) -> Tensor:
        """Rearrange the rows of the layout into [B, L, E] again, with zeros at padding left out."""
        return hidden_states if self.layout is None else self.layout.to_batch(hidden_states)


def prepare_attention(
    *,
    config: RoFormerConfig,
    requested: str,
    output_attentions: bool | None,
    output_hidden_states: bool | None,
    hidden_states: Tensor,
    batch: BatchMetadata,
    layers: nn.Module,
    cache: Cache | None,
    encoder_hidden_states: Tensor | None,
    encoder_attention_mask: Any,
    position_bias: Tensor | None,
    unpad: bool | None,
) -> AttentionInputs:
    """Choose the implementation of a call, and give it padding, causality and documents.

    Linear attention takes the padding mask. `unpadded`, and `auto` where it leaves padding out,
    take a row of documents and their lengths, and so does flash attention. All others, and calls
    that need a mask for another reason, take a mask, which is None without padding and packed
    documents. Which kernel a CPU uses under `auto` and `unpadded` is chosen in each layer, by
    `kernels.attention.select_cpu_attention`.

    Args:
        config: Configuration that the layers were built from.
        requested: Name of the attention implementation that the model was given.
        output_attentions: Whether the call returns attention probabilities.
        output_hidden_states: Whether the call returns the output of each layer.
        hidden_states: [B, L, E], of which only shape, dtype and device are read.
        batch: Positions, padding and documents.
        layers: Module that holds the layers, asked for hooks.
        cache: Cache of a decoder.
        encoder_hidden_states: As given to the model.
        encoder_attention_mask: Likewise.
        position_bias: Added by all layers to their scores, [1 or B, H, L, S].
        unpad: See `RoFormerModel.forward`.

    Raises:
        ValueError: The call contradicts the configuration or the implementation.
    """
    if config.linear_attention is not None:
        return _linear_attention_inputs(batch, requested, output_attentions, output_hidden_states)
    implementation = _select_implementation(config, requested, output_attentions)
    # document lengths in place of a mask allow neither a cache nor an encoder nor a bias
    takes_lengths = implementation in OWN_IMPLEMENTATIONS or _is_flash(implementation)
    needs_mask = cache is not None or encoder_hidden_states is not None or config.has_position_bias
    if takes_lengths and not needs_mask:
        is_allowed = unpad is not False and not output_hidden_states
        can_unpad = is_allowed and _may_unpad(requested, batch, hidden_states, layers)
        inputs = _varlen_inputs(implementation, batch, can_unpad)
        if inputs is not None:
            warns = inputs.layout is not None and unpad is None and requested == AUTO
            if warns and batch.padding_mask is not None and not batch.padding_mask.all():
                logger.warning_once(
                    "last_hidden_state is 0 at padding, where nothing is computed: pool it with "
                    "the attention_mask. attn_implementation='sdpa' computes padding, 'unpadded' "
                    "silences this"
                )
            return inputs
    if batch.packed_document_ids is not None and _is_flash(implementation):
        logger.warning_once(
            f"attn_implementation={implementation!r} keeps documents apart in whole rows only; "
            "calls with a cache, cross-attention, output_hidden_states, unpad=False or a compiler "
            "are computed by sdpa"
        )
        implementation = "sdpa"
    mask = _self_attention_mask(config, requested, implementation, hidden_states, batch, cache)
    if position_bias is not None:
        mask = add_bias_to_mask(mask, position_bias.to(hidden_states))
    encoder_mask = _cross_attention_mask(
        config, implementation, hidden_states, encoder_hidden_states, encoder_attention_mask
    )
    return AttentionInputs(implementation, mask, encoder_attention_mask=encoder_mask)


def _select_implementation(
    config: RoFormerConfig, requested: str, output_attentions: bool | None
) -> str:
    """Return the requested implementation, or one that can compute the call.

    Under a compiler `auto` is sdpa; `unpadded` still takes document lengths that are given.
    """
    implementation = requested
    if requested in OWN_IMPLEMENTATIONS and (
        not kernels_enabled() or (requested == AUTO and is_traced())
    ):
        implementation = "sdpa"
    if output_attentions and implementation != "eager":
        if requested != AUTO:
            logger.warning_once(
                f"attn_implementation={requested!r} returns no attention probabilities; calls "
                "with output_attentions=True are computed by eager attention"
            )
        return "eager"
    if config.has_position_bias and implementation not in ("eager", "sdpa", *OWN_IMPLEMENTATIONS):
        logger.warning_once(
            f"attn_implementation={implementation!r} takes no position bias, which "
            f"position_encoding {config.position_encoding} has; calls are computed by sdpa"
        )
        return "sdpa"
    return implementation


def _may_unpad(
    requested: str, batch: BatchMetadata, hidden_states: Tensor, layers: nn.Module
) -> bool:
    """Return whether padding can be left out of the layers.

    Not while tracing, because the new shapes depend on values that cannot be read. "auto" leaves
    padding out on a CPU only, because other devices would have to be waited for; only where every
    row has a token that is not padding, so that heads read no zeros; and not under hooks of layers,
    which expect the rows of the batch.
    """
    if is_traced() or not can_read_values(hidden_states):
        return False
    if requested != AUTO:
        return True
    if not is_plain_on(hidden_states, "cpu") or batch.padding_mask is None:
        return False
    return not has_hooks(layers) and bool(batch.padding_mask.any(dim=-1).all())


def _linear_attention_inputs(
    batch: BatchMetadata,
    implementation: str,
    output_attentions: bool | None,
    output_hidden_states: bool | None,
) -> AttentionInputs:
    """Return the padding mask, and packed documents in rows of their own."""
    if output_attentions:
        raise ValueError(
            "output_attentions must be False with linear_attention, which computes no "
            "probabilities, got True"
        )
    document_ids = batch.packed_document_ids
    if output_hidden_states and document_ids is not None:
        raise ValueError(
            "output_hidden_states must be False for packed rows with linear_attention, which "
            "computes documents in rows of their own, got True"
        )
    if batch.padding_mask is None:
        raise ValueError(
            "attention_mask must be [B, S] with linear_attention, got four dimensions; pass the "
            "padding mask"
        )
    if document_ids is None:
        return AttentionInputs(implementation, batch.padding_mask)
    layout = split_documents(document_ids)
    return AttentionInputs(implementation, layout.to_layout(batch.padding_mask), layout)


def _is_flash(implementation: str) -> bool:
    """Return whether an implementation is flash attention, also of the hub: it takes no mask."""
    return "flash" in implementation


def _is_4d(mask: Any) -> bool:
    """Return whether a mask has four dimensions and is used as it is."""
    return isinstance(mask, Tensor) and mask.ndim == 4


def _varlen_inputs(
    implementation: str, batch: BatchMetadata, can_unpad: bool
) -> AttentionInputs | None:
    """Return document lengths in place of a mask, or None.

    Lengths that the caller gave are used if they describe a single row without a mask, and either
    CUDA computes it or no compiler runs; otherwise they are computed where padding may be left out.
    None: the rows stay as they are, with a mask if one is needed.
    """
    layout, mask, max_seqlen = None, batch.padding_mask, batch.max_seqlen
    is_one_row = batch.document_ids is not None and len(batch.document_ids) == 1
    # on a CPU lengths are read on the host, which no compiler follows (nor in float32 on CUDA)
    can_read = batch.position_ids.is_cuda or not torch.compiler.is_compiling()
    takes_given = is_one_row and can_read and batch.attention_mask is None
    cu_seqlens = batch.cu_seqlens if takes_given else None
    if cu_seqlens is None:
        # rows that are one document each, without padding, need neither lengths nor a mask
        if not can_unpad or mask is None or (batch.document_ids is None and mask.all()):
            return None
        unpadded = remove_padding(mask, batch.document_ids)
        if unpadded is None:
            return None
        (layout, cu_seqlens), max_seqlen = unpadded, None
    if max_seqlen is None:  # this waits for the device
        max_seqlen = int(cu_seqlens.diff().max())
    cu_seqlens = cu_seqlens.to(torch.int32)
    kwargs: dict[str, Any] = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    kwargs |= {"max_length_q": max_seqlen, "max_length_k": max_seqlen}
    return AttentionInputs(implementation, None, layout, kwargs)


def _self_attention_mask(
    config: RoFormerConfig,
    requested: str,
    implementation: str,
    hidden_states: Tensor,
    batch: BatchMetadata,
    cache: Cache | None,
) -> Any:
    """Create the mask of a self-attention, in the form of the implementation that will take it."""
    attention_mask, document_ids = batch.attention_mask, batch.packed_document_ids
    if config.has_position_bias:
        implementation = "eager"  # whose mask is additive
    if _is_4d(attention_mask):
        return _convert_4d_mask(implementation, hidden_states, attention_mask)
    kwargs: dict[str, Any] = {"attention_mask": attention_mask}
    if document_ids is not None:
        kwargs["and_mask_function"] = packed_sequence_mask_function(document_ids)
    config = _with_implementation(config, implementation)
    if config.is_decoder:
        mask = create_causal_mask(config, hidden_states, past_key_values=cache, **kwargs)
    else:
        # transformers asks the device whether a mask has padding: "auto" does not wait for that
        may_wait = requested != AUTO or hidden_states.device.type == "cpu"
        kwargs["allow_is_bidirectional_skip"] = may_wait or attention_mask is None
        mask = create_bidirectional_mask(config, hidden_states, **kwargs)
    if document_ids is not None and (mask is None or getattr(mask, "ndim", 4) == 2):
        raise ValueError(
            f"attn_implementation must take a mask for packed rows, got {implementation!r}, which "
            "has none that keeps documents apart; use sdpa"
        )
    return mask


def _cross_attention_mask(
    config: RoFormerConfig,
    implementation: str,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    encoder_attention_mask: Tensor | None,
) -> Any:
    """Create the mask of a cross-attention from the encoder's mask, [B, S] or four-dimensional."""
    if encoder_hidden_states is None or encoder_attention_mask is None:
        return None
    if _is_4d(encoder_attention_mask):
        return _convert_4d_mask(implementation, hidden_states, encoder_attention_mask)
    return create_bidirectional_mask(
        _with_implementation(config, implementation),
        hidden_states,
        attention_mask=encoder_attention_mask,
        encoder_hidden_states=encoder_hidden_states,
    )


def _with_implementation(config: RoFormerConfig, implementation: str) -> RoFormerConfig:
    """Return the configuration with another implementation, from which masks take their form."""
    if implementation == config._attn_implementation:
        return config
    other = object.__new__(type(config))  # the compiler of torch 2.11 does not trace copy.copy
    other.__dict__.update(config.__dict__)
    other._attn_implementation = implementation
    return other


def add_bias_to_mask(mask: Tensor | None, position_bias: Tensor) -> Tensor:
    """Return the sum of an additive mask, if there is one, and a position bias."""
    if mask is None:
        return position_bias
    total = mask + position_bias.to(mask.dtype)
    if total.dtype != torch.float16:
        return total
    # two large float16 values add up to -inf, and softmax of a row that is all -inf is NaN
    return total.clamp(min=torch.finfo(total.dtype).min)


def _convert_4d_mask(implementation: str, hidden_states: Tensor, mask: Tensor) -> Tensor:
    """Bring a [B or 1, 1 or H, L or 1, S] mask into the form of an implementation.

    Boolean masks stay boolean for sdpa and become additive for all others.
    """
    if _is_flash(implementation) or implementation == "flex_attention":
        raise ValueError(
            f"attention_mask must be [B, S] with attn_implementation={implementation!r}, got shape "
            f"{tuple(mask.shape)}; use sdpa for masks of four dimensions"
        )
    dtype = hidden_states.dtype
    lowest = torch.finfo(dtype).min
    if mask.is_floating_point():
        # the lowest float32 would become -inf, and softmax of a row that is all -inf is NaN
        mask = mask.to(dtype).clamp(min=lowest)
    else:
        mask = mask.bool()
        if implementation not in ("sdpa", *OWN_IMPLEMENTATIONS):
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)
    return mask.expand(hidden_states.shape[0], -1, hidden_states.shape[1], -1)
