"""What a RoFormer is made of: embeddings, attention, feed-forward, and the language-model head.

Module and parameter names are those of transformers' own RoFormer, so that checkpoints pass both
ways. Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864), sections 3.2 and 3.3.

Legend: B batch, L tokens, S keys, E width, H heads, D head width, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_masks import with_bias
from .configuration_roformer import RoFormerConfig
from .kernels.attention import eager_attention
from .kernels.dispatch import is_traced
from .kernels.dropout import Dropout
from .kernels.linear import dense, is_untouched
from .linear_attention import Features, linear_attention
from .position_encodings import TransformerXLTerms, sinusoids
from .rotary import half_split_order, rotate

KEEP_THEIR_INPUT = frozenset({"gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish", "mish"})
"""Activations whose backward pass reads what went in; others, as relu, read what came out."""


def _norm(config: RoFormerConfig, width: int) -> nn.Module:
    if config.norm_type == "rms_norm":
        return nn.RMSNorm(width, eps=config.layer_norm_eps, elementwise_affine=False)
    return nn.LayerNorm(width, eps=config.layer_norm_eps, bias=config.use_bias)


class RoFormerEmbeddings(nn.Module):
    """Word and token-type embeddings, normalised; positions enter here for two encodings alone."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        width, pad = config.word_width, config.pad_token_id
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=pad)
        types, places = config.type_vocab_size, config.max_position_embeddings
        is_learned = config.position_encoding == "learned"
        self.token_type_embeddings = nn.Embedding(types, width) if types else None
        self.position_embeddings = nn.Embedding(places, width) if is_learned else None
        self.has_sinusoids = config.position_encoding == "sinusoidal"
        self.LayerNorm = _norm(config, width)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        positions: Tensor,
    ) -> Tensor:
        """[B, L] ids, or [B, L, embedding_size] vectors, to [B, L, embedding_size]."""
        words = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if self.position_embeddings is not None:
            words = words + self.position_embeddings(positions)
        elif self.has_sinusoids:  # words as large as sinusoids: Vaswani et al., section 3.4
            width = words.shape[-1]
            words = words * width**0.5 + sinusoids(positions, width).to(words.dtype)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(1, dtype=torch.long, device=words.device)
            words = words + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(words))


class RoFormerSelfAttention(nn.Module):
    """Multi-head attention whose scores know positions m and n by m - n only (equation 16).

    `where` is what it must know of positions: for RoPE the table of rotations, for Transformer-XL
    distances, for other encodings nothing.

    As cross-attention, keys and values come from an encoder and nothing is rotated: its positions
    and the decoder's have no common origin.
    """

    def __init__(self, config: RoFormerConfig, layer_idx: int, crosses: bool = False) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.crosses = crosses
        self.heads = (config.num_attention_heads, config.head_width)
        self.rotates = config.position_encoding == "rope" and not crosses
        self.interleave = config.rope_interleave
        self.scaling = config.head_width**-0.5
        self.is_causal = config.is_decoder and not crosses
        is_relative = config.position_encoding == "transformer_xl" and not crosses
        self.relative = TransformerXLTerms(config) if is_relative else None
        self.features = None if config.linear_attention is None else Features(config)
        self.dropout = Dropout(config.attention_probs_dropout_prob)
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.key = nn.Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.value = nn.Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        where: Any,
        source: Tensor | None,
        past_key_values: Cache | None,
        implementation: str,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, L, E] to [B, L, E] and, from the eager kernel, probabilities [B, H, L, S]."""
        if self.features is not None:
            told = attention_mask, where, past_key_values
            return self._by_features(self.features, hidden_states, *told), None
        heads = (*hidden_states.shape[:-1], *self.heads)
        q = dense(self.query, hidden_states).view(heads)  # [B, L, H, D]
        if self.relative is not None:
            q, scores = self.relative(q, where)
            attention_mask = with_bias(attention_mask, scores * self.scaling)
        elif self.rotates:
            q = rotate(q, where, self.interleave)
        k, v = self._keys_and_values(
            hidden_states if source is None else source, where, past_key_values
        )
        # transformers looks for this very call to know that kernels can be changed at run time
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        context, probabilities = attend(
            self,
            q.transpose(1, 2),  # [B, H, L, D]
            k,
            v,
            attention_mask,
            scaling=self.scaling,
            dropout=self.dropout.p if self.dropout.training else 0.0,
            **kwargs,
        )
        return context.flatten(-2), probabilities

    def _by_features(
        self, features: Features, hidden_states: Tensor, real: Tensor | None, where: Any, cache: Any
    ) -> Tensor:
        """Linear attention: `real` [B, L] is False for padding, `cache` a `LinearCache`."""
        heads = (*hidden_states.shape[:-1], *self.heads)
        layers = self.query, self.key, self.value
        q, k, v = (dense(layer, hidden_states).view(heads) for layer in layers)
        before = None if cache is None else cache.sums.get(self.layer_idx)
        mixed, sums = linear_attention(
            q, k, v, features, where, self.interleave, real, self.is_causal, before
        )
        if cache is not None:
            cache.sums[self.layer_idx] = sums
        return mixed.flatten(-2)

    def _keys_and_values(
        self, source: Tensor, where: Any, past_key_values: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, [B, H, S, D], with those of earlier calls in front."""
        cache = past_key_values
        if isinstance(past_key_values, EncoderDecoderCache):
            cache = past_key_values.self_attention_cache
            if self.crosses:
                cache = past_key_values.cross_attention_cache
                if past_key_values.is_updated.get(self.layer_idx):
                    layer = cache.layers[self.layer_idx]
                    return layer.keys, layer.values
                past_key_values.is_updated[self.layer_idx] = True
        elif self.crosses:
            cache = None  # a cache of one part holds the decoder's own
        heads = (*source.shape[:-1], *self.heads)
        k, v = (dense(layer, source).view(heads) for layer in (self.key, self.value))
        if self.rotates:
            k = rotate(k, where, self.interleave)
            if self.config.rotary_value:
                v = rotate(v, where, self.interleave)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return (k, v) if cache is None else cache.update(k, v, self.layer_idx)


class RoFormerResidual(nn.Module):
    """Projection, dropout, sum with the input, normalisation: how both halves of a layer end."""

    def __init__(self, config: RoFormerConfig, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size, bias=config.use_bias)
        self.LayerNorm = _norm(config, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self, x: Tensor, residual: Tensor, again: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """[B, L, width] and [B, L, E] to [B, L, E].

        With `again`, which computes x, x itself is not kept for the backward pass.
        """
        with nullcontext() if again is None else _recomputed(x, again):
            projected = dense(self.dense, x)
        return self.LayerNorm(self.dropout(projected) + residual)


@contextmanager
def _recomputed(x: Tensor, again: Callable[[], Tensor]) -> Iterator[None]:
    """Within, `x` is not kept for the backward pass but computed again there.

    Used for activations that keep their input in any case: without their output a layer keeps 14
    instead of 18 times [B, L, E] of a base model, for one more activation.
    """
    place = x.untyped_storage()._cdata  # not x itself: hooks live as long as what they packed

    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        if tensor.untyped_storage()._cdata == place:
            shape = tensor.shape
            return lambda: again().view(shape)
        version = tensor._version

        def same() -> Tensor:
            if tensor._version != version:  # which autograd does not ask where there are hooks
                raise RuntimeError(
                    "weights must stay as they are between the forward and the backward pass, got "
                    f"{list(tensor.shape)} modified by an inplace operation"
                )
            return tensor

        return same

    def unpack(packed: Callable[[], Tensor]) -> Tensor:
        return packed()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _keeps_tensors() -> bool:
    """Whether a backward pass of the ordinary kind will follow.

    Compilers and tracers choose what to keep by themselves; so do checkpoints, offloading and
    others that set hooks of their own; and torch.func allows none.
    """
    if not torch.is_grad_enabled() or is_traced():
        return False
    kept_otherwise = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    allowed = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return allowed and not kept_otherwise


class RoFormerAttention(nn.Module):
    """Self-attention, or cross-attention, and its residual."""

    def __init__(self, config: RoFormerConfig, layer_idx: int, crosses: bool = False) -> None:
        super().__init__()
        self.self = RoFormerSelfAttention(config, layer_idx, crosses)
        self.output = RoFormerResidual(config, config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        where: Any,
        source: Tensor | None,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, L, E] to [B, L, E], both of the text that attends; it reads `source`, or itself."""
        told = attention_mask, where, source, past_key_values
        context, _ = self.self(hidden_states, *told, **kwargs)
        return self.output(context, hidden_states)

    def set_interleave(self, interleave: bool) -> None:
        """Reorder the weights for the other pairing of coordinates, in place."""
        attention, config = self.self, self.self.config
        if attention.rotates and attention.interleave != interleave:
            order = half_split_order(config.head_width, config.rotated_width)
            order = order.argsort() if interleave else order
            turned = [attention.query, attention.key]
            if config.rotary_value:
                turned.append(attention.value)
                _permute(self.output.dense.weight, order, dim=1)
            for linear in turned:
                for parameter in linear.parameters():
                    _permute(parameter, order, dim=0)
        attention.interleave = interleave


def _permute(parameter: Tensor, order: Tensor, dim: int) -> None:
    """Reorder the coordinates of each head in place."""
    heads = parameter.unflatten(dim, (-1, len(order)))
    parameter.copy_(heads.index_select(dim + 1, order.to(parameter.device)).flatten(dim, dim + 1))


class RoFormerIntermediate(nn.Module):
    """The widening half of the feed-forward block."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.intermediate_act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, L, E] to [B, L, intermediate_size]."""
        return dense(self.dense, hidden_states, self.intermediate_act_fn)


class RoFormerLayer(GradientCheckpointingLayer):
    """Attention, in a decoder cross-attention, and feed-forward, each normalised after its sum."""

    def __init__(self, config: RoFormerConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = RoFormerAttention(config, layer_idx)
        if config.add_cross_attention:
            self.crossattention = RoFormerAttention(config, layer_idx, crosses=True)
        self.intermediate = RoFormerIntermediate(config)
        self.output = RoFormerResidual(config, config.intermediate_size)
        self.keeps_its_input = config.hidden_act in KEEP_THEIR_INPUT
        self.activation_type = type(self.intermediate.intermediate_act_fn)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        where: Any,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, L, E] to [B, L, E]."""
        attended = self.attention(
            hidden_states, attention_mask, where, None, past_key_values, **kwargs
        )
        if encoder_hidden_states is not None:
            attended = self.crossattention(
                attended,
                encoder_attention_mask,
                where,
                encoder_hidden_states,
                past_key_values,
                **kwargs,
            )
        if not self._may_recompute():
            return self.output(self.intermediate(attended), attended)
        before = dense(self.intermediate.dense, attended)
        again = partial(self.intermediate.intermediate_act_fn, before)
        return self.output(again(), attended, again)

    def _may_recompute(self) -> bool:
        """Whether the activation's output may be computed again instead of being kept.

        Not with what is somebody else's: what they make of it may not come out a second time.
        """
        if not (self.keeps_its_input and _keeps_tensors()):
            return False
        widen, close = self.intermediate, self.output
        parts: dict[nn.Module, type] = {
            widen: RoFormerIntermediate,
            widen.intermediate_act_fn: self.activation_type,
        }
        parts |= {close: RoFormerResidual, close.dense: nn.Linear}
        return all(is_untouched(part, made) for part, made in parts.items())


class RoFormerEncoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            RoFormerLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.register_load_state_dict_pre_hook(_without_sines)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        where: Any,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, L, E] to [B, L, E].

        Args:
            hidden_states: [B, L, E].
            attention_mask: As the kernel wants it.
            where: What layers must know of positions.
            encoder_hidden_states: [B, S, E], for cross-attention.
            encoder_attention_mask: As the kernel wants it.
            **kwargs: Cache, kernel and what else it is told.
        """
        # by position: a checkpointed layer passes no gradient on to what comes by name
        shared = attention_mask, where, encoder_hidden_states, encoder_attention_mask
        for layer in self.layer:
            hidden_states = layer(hidden_states, *shared, **kwargs)
        return hidden_states


def _without_sines(encoder: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Take stock's table of sines, which is computed here, out of a state that is being loaded."""
    state.pop(f"{prefix}embed_positions.weight", None)


class RoFormerPredictionHeadTransform(nn.Module):
    """Dense, activation, normalisation: from encoder width to embedding width."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        width = config.word_width
        self.dense = nn.Linear(config.hidden_size, width, bias=config.use_bias)
        self.transform_act_fn = ACT2FN[config.hidden_act]
        self.LayerNorm = _norm(config, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] to [..., embedding_size]."""
        return self.LayerNorm(dense(self.dense, hidden_states, self.transform_act_fn))


class RoFormerLMPredictionHead(nn.Module):
    """Scores over the vocabulary; the decoder shares the word embeddings when they are tied."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.transform = RoFormerPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.word_width, config.vocab_size, bias=config.use_bias)
        if config.use_bias:
            # stock saves the bias under this second name; it is tied to the decoder's own
            self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] to [..., V]."""
        return dense(self.decoder, self.transform(hidden_states))


class RoFormerOnlyMLMHead(nn.Module):
    """The language-model head, under the name the checkpoints give it."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.predictions = RoFormerLMPredictionHead(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] to [..., V]."""
        return self.predictions(hidden_states)
