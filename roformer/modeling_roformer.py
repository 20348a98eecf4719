"""RoFormer: a BERT encoder whose self-attention rotates queries and keys by their position.

Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864). Module and parameter names are those of
transformers' own RoFormer, so that checkpoints pass both ways; what differs is that positions come
from `position_ids`, angles stay exact, the rotation is computed once a forward, not a layer, and
every attention kernel works, with documents in packed rows kept apart.

Legend: B batch, L tokens, S keys, T tokens without padding, E width, H heads, D head width,
V vocabulary.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from . import documents
from .attention import UNPADDED, eager_attention
from .configuration_roformer import RoFormerConfig
from .dropout import Dropout, is_plain
from .inputs import check_masks, check_positions, check_source, check_tokens
from .linear import Features, LinearCache, linear_attention
from .positions import TransformerXLTerms, distances, score_bias, sinusoids
from .rotary import frequencies, half_split_order, rotate, rotation_table

logger = logging.get_logger(__name__)

KEEP_THEIR_INPUT = frozenset({"gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish", "mish"})
"""Activations whose backward pass reads what went in; others, as relu, read what came out."""


def _embedding_width(config: RoFormerConfig) -> int:
    return config.embedding_size or config.hidden_size


def _norm(config: RoFormerConfig, width: int) -> nn.Module:
    if config.norm_type == "rms_norm":
        return nn.RMSNorm(width, eps=config.layer_norm_eps, elementwise_affine=False)
    return nn.LayerNorm(width, eps=config.layer_norm_eps, bias=config.use_bias)


class RoFormerEmbeddings(nn.Module):
    """Word and token-type embeddings, normalised; positions enter here for two encodings alone."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        width = _embedding_width(config)
        self.word_embeddings = nn.Embedding(
            config.vocab_size, width, padding_idx=config.pad_token_id
        )
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        if config.position_encoding == "learned":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
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
        if hasattr(self, "position_embeddings"):
            words = words + self.position_embeddings(positions)
        elif self.has_sinusoids:  # words as large as sinusoids: Vaswani et al., section 3.4
            width = words.shape[-1]
            words = words * width**0.5 + sinusoids(positions, width).to(words.dtype)
        if hasattr(self, "token_type_embeddings"):
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
        if config.position_encoding == "transformer_xl" and not crosses:
            self.relative = TransformerXLTerms(config)
        if config.linear_attention is not None:
            self.features = Features(config)
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
        if hasattr(self, "features"):
            return self._by_features(hidden_states, attention_mask, where, past_key_values), None
        heads = (*hidden_states.shape[:-1], *self.heads)
        q = self.query(hidden_states).view(heads)  # [B, L, H, D]
        if hasattr(self, "relative"):
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
            dropout=self.config.attention_probs_dropout_prob if self.training else 0.0,
            **kwargs,
        )
        return context.flatten(-2), probabilities

    def _by_features(
        self, hidden_states: Tensor, real: Tensor | None, where: Any, cache: Any
    ) -> Tensor:
        """Linear attention: `real` [B, L] is False for padding, `cache` a `LinearCache`."""
        heads = (*hidden_states.shape[:-1], *self.heads)
        q, k, v = (x(hidden_states).view(heads) for x in (self.query, self.key, self.value))
        before = None if cache is None else cache.sums.get(self.layer_idx)
        turns = where, self.interleave
        mixed, sums = linear_attention(q, k, v, self.features, *turns, real, self.is_causal, before)
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
        k, v = self.key(source).view(heads), self.value(source).view(heads)
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
        # a layer put in the place of ours (LoRA) may keep x in another form
        if again is None or type(self.dense) is not nn.Linear or not _keeps_tensors():
            projected = self.dense(x)
        else:
            with _recomputed(x, again):
                projected = self.dense(x)
        return self.LayerNorm(self.dropout(projected) + residual)


@contextmanager
def _recomputed(x: Tensor, again: Callable[[], Tensor]) -> Iterator[None]:
    """Within, `x` is not kept for the backward pass but computed again there.

    Used for activations that keep their input in any case: without their output a layer keeps 14
    instead of 18 times [B, L, E] of a base model, for one more activation.
    """
    place = x.untyped_storage()._cdata  # not x itself: hooks live as long as what they packed

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        if tensor.untyped_storage()._cdata != place:
            return tensor
        shape = tensor.shape
        return lambda: again().view(shape)

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _keeps_tensors() -> bool:
    """Whether a backward pass of the ordinary kind will follow.

    Compilers choose what to keep by themselves, a checkpoint keeps nothing, and torch.func allows
    no hooks.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    inside_checkpoint = hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
    return not (inside_checkpoint or torch._C._are_functorch_transforms_active())


class RoFormerAttention(nn.Module):
    """Self-attention, or cross-attention, and its residual."""

    def __init__(self, config: RoFormerConfig, layer_idx: int, crosses: bool = False) -> None:
        super().__init__()
        self.self = RoFormerSelfAttention(config, layer_idx, crosses)
        self.output = RoFormerResidual(config, config.hidden_size)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[B, L, E] to [B, L, E]."""
        context, _ = self.self(hidden_states, *args, **kwargs)
        return self.output(context, hidden_states)


class RoFormerIntermediate(nn.Module):
    """The widening half of the feed-forward block."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.intermediate_act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L, E] to [B, L, intermediate_size] twice: before and after the activation."""
        widened = self.dense(hidden_states)
        return widened, self.intermediate_act_fn(widened)


class RoFormerLayer(GradientCheckpointingLayer):
    """Attention, in a decoder cross-attention, and feed-forward, each normalised after its sum."""

    def __init__(self, config: RoFormerConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = RoFormerAttention(config, layer_idx)
        if config.add_cross_attention:
            self.crossattention = RoFormerAttention(config, layer_idx, crosses=True)
        self.intermediate = RoFormerIntermediate(config)
        self.output = RoFormerResidual(config, config.intermediate_size)
        self.recomputes = config.hidden_act in KEEP_THEIR_INPUT

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
        before, after = self.intermediate(attended)
        again = partial(self.intermediate.intermediate_act_fn, before)
        return self.output(after, attended, again if self.recomputes else None)


class RoFormerEncoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            RoFormerLayer(config, i) for i in range(config.num_hidden_layers)
        )

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[B, L, E] to [B, L, E]."""
        for layer in self.layer:
            hidden_states = layer(hidden_states, *args, **kwargs)
        return hidden_states


class RoFormerPredictionHeadTransform(nn.Module):
    """Dense, activation, normalisation: from encoder width to embedding width."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        width = _embedding_width(config)
        self.dense = nn.Linear(config.hidden_size, width, bias=config.use_bias)
        self.transform_act_fn = ACT2FN[config.hidden_act]
        self.LayerNorm = _norm(config, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] to [..., embedding_size]."""
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


class RoFormerLMPredictionHead(nn.Module):
    """Scores over the vocabulary; the decoder shares the word embeddings when they are tied."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.transform = RoFormerPredictionHeadTransform(config)
        self.decoder = nn.Linear(_embedding_width(config), config.vocab_size, bias=config.use_bias)
        if config.use_bias:
            # stock saves the bias under this second name; it is tied to the decoder's own
            self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] to [..., V]."""
        return self.decoder(self.transform(hidden_states))


class RoFormerOnlyMLMHead(nn.Module):
    """The language-model head, under the name the checkpoints give it."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.predictions = RoFormerLMPredictionHead(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] to [..., V]."""
        return self.predictions(hidden_states)


class RoFormerPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by all RoFormer models.

    `from_pretrained` and `save_pretrained` are transformers'. `attn_implementation` may be eager,
    sdpa, flex_attention, flash_attention_2 or `unpadded` (no padding computed, no dependency).
    """

    config: RoFormerConfig
    config_class = RoFormerConfig
    base_model_prefix = "roformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _no_split_modules = ["RoFormerEmbeddings", "RoFormerLayer"]  # noqa: RUF012 transformers' type
    _can_record_outputs = {  # noqa: RUF012 likewise
        "hidden_states": RoFormerLayer,
        "attentions": OutputRecorder(RoFormerSelfAttention, index=1, layer_name="attention"),
        "cross_attentions": OutputRecorder(
            RoFormerSelfAttention, index=1, layer_name="crossattention"
        ),
    }
    # stock saves its table of sines; ours are computed, so the key is read and dropped
    _keys_to_ignore_on_load_unexpected = [r"encoder\.embed_positions\.weight"]  # noqa: RUF012

    def __init__(self, config: RoFormerConfig, *args: Any, **kwargs: Any) -> None:
        config.check()  # fields may have been edited since it was made
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RoFormerLMPredictionHead) and hasattr(module, "bias"):
            nn.init.zeros_(module.bias)
        if isinstance(module, Features):
            module.reset()
        if isinstance(module, TransformerXLTerms):
            for bias in (module.u, module.v):
                nn.init.normal_(bias, std=self.config.initializer_range)

    @torch.no_grad()
    def set_rope_interleave(self, interleave: bool) -> None:
        """Convert the weights to the other pairing of coordinates; every output stays as it was.

        The rows of queries and keys (and of values, and the columns that read them, under
        `rotary_value`) are permuted, which loses nothing: converted back they are the same bits.

        Args:
            interleave: True for adjacent pairs, the paper's; False for coordinates i and i + D/2,
                so that kernels written for Llama run these weights.

        Raises:
            ValueError: An EncoderDecoderModel has given the model a configuration of stock's class,
                or nothing is rotated, or features of FAVOR+, which have no order.
        """
        if getattr(self.config, "linear_attention", None) == "favor":
            raise ValueError(
                "set_rope_interleave must not be called with linear_attention favor, got a call: "
                "random features have no order; leave it out"
            )
        encoding = getattr(self.config, "position_encoding", "rope")
        if encoding != "rope":
            raise ValueError(
                "set_rope_interleave must be called on a model that rotates, got "
                f"position_encoding {encoding}; leave it out"
            )
        if not isinstance(self.config, RoFormerConfig):
            raise ValueError(
                "set_rope_interleave must be called on a model with a configuration of its own, "
                f"got {type(self.config).__module__}'s; convert it before it is composed"
            )
        modules = [m for m in self.modules() if isinstance(m, RoFormerAttention)]
        for module in modules:
            attention = module.self
            if attention.interleave != interleave and not attention.crosses:
                _permute_attention(module, interleave)
            attention.interleave = interleave
        # models made from one configuration share it, and the others are not converted
        own = copy.copy(self.config) if self.config is modules[0].self.config else self.config
        own.rope_interleave = interleave
        for holder in self.modules():
            for name in ("config", "rope_config"):
                if hasattr(holder, name):
                    setattr(holder, name, own)


def _permute_attention(module: RoFormerAttention, interleave: bool) -> None:
    attention, config = module.self, module.self.config
    order = half_split_order(config.head_width, config.rotated_width)
    order = order.argsort() if interleave else order
    turned = [attention.query, attention.key]
    if config.rotary_value:
        turned.append(attention.value)
        _permute(module.output.dense.weight, order, dim=1)
    for linear in turned:
        for parameter in linear.parameters():
            _permute(parameter, order, dim=0)


def _permute(parameter: Tensor, order: Tensor, dim: int) -> None:
    """Reorder the coordinates of each head in place."""
    heads = parameter.unflatten(dim, (-1, len(order)))
    parameter.copy_(heads.index_select(dim + 1, order.to(parameter.device)).flatten(dim, dim + 1))


class RoFormerModel(RoFormerPreTrainedModel):
    """The encoder (or with `config.is_decoder` the decoder) without a head."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        self.embeddings = RoFormerEmbeddings(config)
        if config.embedding_size != config.hidden_size:
            width = _embedding_width(config)
            self.embeddings_project = nn.Linear(width, config.hidden_size, bias=config.use_bias)
        self.encoder = RoFormerEncoder(config)
        self.score_bias = score_bias(config)
        # EncoderDecoderModel replaces `config` by one of stock's class, without rope settings
        self.rope_config = config
        self.is_causal = config.is_decoder
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embeddings."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word embeddings."""
        self.embeddings.word_embeddings = value

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Encode tokens.

        Documents packed into one row do not see each other when `position_ids` start from 0 for
        each, or `cu_seq_lens_q` is given; they come out as they would alone.

        Args:
            input_ids: [B, L] token ids, int32 or int64.
            attention_mask: [B, S], 1 for a token and 0 for padding, S counting cached tokens; or
                ready-made [B or 1, 1 or H, L, S], bool (True is seen) or floats added to scores,
                which is taken as it is: causality and documents are its business.
            token_type_ids: [B, L] segments; None means all 0.
            position_ids: [L] or [B, L] integers, any start, order and gaps; None counts from 0, or
                from the end of the cache. A row that counts up from 0 more than once is packed.
                Encodings that add to scores count tokens behind a cache, whatever is given.
            inputs_embeds: [B, L, embedding_size] in place of `input_ids`.
            encoder_hidden_states: [B, S, E], what the cross-attention of a decoder reads.
            encoder_attention_mask: [B, S] for it.
            past_key_values: Keys and values of earlier calls of a decoder.
            use_cache: Return them; a decoder's default is the configuration's.
            cu_seq_lens_q: [documents + 1] int32, ends of the documents in the flattened rows.
            max_length_q: Tokens of the longest of these documents.
            **kwargs: transformers' `output_hidden_states`, `output_attentions` (through the eager
                kernel, whatever the chosen one), `return_dict`.

        Returns:
            `last_hidden_state` [B, L, E] and what was asked for.

        Raises:
            ValueError: Inputs contradict each other or the configuration; ids outside the
                vocabulary are noticed on CPU only, so that no step waits for another device.
        """
        check_tokens(self.rope_config, input_ids, inputs_embeds, token_type_ids, position_ids)
        rows = input_ids if inputs_embeds is None else inputs_embeds
        assert rows is not None, "one of the two has been given"
        given, past_key_values = (
            past_key_values,
            self._cache(past_key_values, use_cache, encoder_hidden_states),
        )
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        check_masks(rows, start, attention_mask, cu_seq_lens_q)
        check_source(self.rope_config, rows, encoder_hidden_states, encoder_attention_mask)
        batch = documents.arrange(rows, start, attention_mask, position_ids, cu_seq_lens_q)
        check_positions(self.rope_config, batch.positions)
        words = self._embed(input_ids, token_type_ids, inputs_embeds, batch.positions)
        if batch.documents is not None and past_key_values is not None:
            past_key_values = _no_cache_for_packed_rows(given)
        kernel = self._kernel(kwargs)
        given_positions = position_ids is not None or batch.documents is not None
        where, bias = self._where(batch, start, given_positions)
        told: dict[str, Any] = {}
        layout: documents.Apart | documents.Unpadded | None = None
        mask: Any = None
        alone = past_key_values is None and encoder_hidden_states is None
        if self.rope_config.linear_attention is not None:
            layout, mask = self._before_linear(batch, kwargs)
        elif alone and (kernel == UNPADDED or kernel.startswith("flash")):
            borders = cu_seq_lens_q if _is_one_row(words, attention_mask) else None
            layout, told = self._without_padding(batch, borders, max_length_q, kwargs)
        if layout is not None:
            if where is not None:
                where = layout.pack(where.expand(*words.shape[:2], -1, -1))
            words = layout.pack(words)
        if not told and self.rope_config.linear_attention is None:
            kernel = _masked(kernel, batch.documents)
            mask = self._mask(kernel, words, attention_mask, batch.documents, past_key_values)
            mask = mask if bias is None else with_bias(mask, bias.to(words.dtype))
        hidden_states = self.encoder(
            words,
            mask,
            where,
            encoder_hidden_states,
            self._cross_mask(kernel, words, encoder_hidden_states, encoder_attention_mask),
            past_key_values=past_key_values,
            implementation=kernel,
            **(kwargs | told),
        )
        if isinstance(past_key_values, LinearCache):
            past_key_values.tokens += rows.shape[1]
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states if layout is None else layout.unpack(hidden_states),
            past_key_values=past_key_values,
        )

    def _embed(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        positions: Tensor,
    ) -> Tensor:
        embedded = self.embeddings(input_ids, token_type_ids, inputs_embeds, positions)
        if self.config.embedding_size == self.config.hidden_size:
            return embedded
        return self.embeddings_project(embedded)

    def _cache(
        self, given: Cache | None, use_cache: bool | None, encoder_hidden_states: Tensor | None
    ) -> Cache | None:
        if given is not None and not (isinstance(given, Cache) and self.is_causal):
            found = type(given).__name__ if self.is_causal else "a cache in an encoder"
            raise ValueError(
                f"past_key_values must be a transformers Cache of a decoder, got {found}; set "
                "is_decoder=True, or leave it out"
            )
        if given is not None and self.rope_config.biases_scores and given.is_compileable:
            raise ValueError(
                "past_key_values must be a cache that grows where positions are added to scores, "
                f"got a {type(given).__name__}; leave cache_implementation out"
            )
        if given is not None and self.rope_config.depends_on_length:
            raise ValueError(
                "past_key_values must be None where the rotation depends on the length, because "
                "cached keys were turned for a shorter row, got a cache; set use_cache=False"
            )
        if self.rope_config.linear_attention is not None:
            return _linear_cache(given, bool(use_cache and self.is_causal))
        if given is not None or not (use_cache and self.is_causal):
            return given
        own = DynamicCache(config=self.config)
        if encoder_hidden_states is None:
            return own
        return EncoderDecoderCache(own, DynamicCache(config=self.config))

    def _without_padding(
        self,
        batch: documents.Batch,
        borders: Tensor | None,
        longest: int | None,
        options: dict[str, Any],
    ) -> tuple[documents.Unpadded | None, dict[str, Any]]:
        """One row of real tokens, and what kernels for variable lengths must be told of it."""
        if borders is not None:  # it is that row already
            return None, documents.kernel_options(borders.to(batch.positions.device), longest)
        layout = None
        if batch.real is not None and self._may_drop_padding(options):
            layout = documents.unpad(batch.real, batch.documents)
        if layout is None:
            return None, {}
        return layout, documents.kernel_options(layout.borders, layout.longest)

    def _before_linear(
        self, batch: documents.Batch, options: dict[str, Any]
    ) -> tuple[documents.Apart | None, Tensor | None]:
        """Documents in rows of their own, and which tokens are real; in training new features."""
        if batch.real is None:
            raise ValueError(
                "attention_mask must be [B, S] with linear_attention, got four dimensions; there "
                "are no scores it could be added to"
            )
        if self.training and self.rope_config.linear_attention == "favor":
            for module in self.modules():  # here, for a checkpointed layer runs twice
                if isinstance(module, Features):
                    module.advance()
        if batch.documents is None:
            return None, batch.real
        if options.get("output_hidden_states", self.config.output_hidden_states):
            raise ValueError(
                "output_hidden_states must be False for packed rows with linear_attention, got "
                "True: inside, documents stand in rows of their own; give each a row"
            )
        layout = documents.apart(batch.documents)
        return layout, layout.pack(batch.real)

    def _where(
        self, batch: documents.Batch, start: int | Tensor, given: bool
    ) -> tuple[Any, Tensor | None]:
        """What layers must know of positions, and what all of them add to their scores."""
        if self.rope_config.position_encoding == "rope":
            return self._rotation(batch), None
        if not self.rope_config.biases_scores:
            return None, None
        found = distances(batch.positions, int(start), given)
        return found, None if self.score_bias is None else self.score_bias(found)

    def _rotation(self, batch: documents.Batch) -> Tensor:
        """Cosines and sines of this call, [1 or B, L, D'/2, 2], float32, for all layers.

        Computed from the configuration on every call: a buffer would be cast by `.bfloat16()`, left
        uninitialised by a load on the meta device, and wrong after an edit of the configuration.
        """
        lengths = batch.lengths() if self.rope_config.depends_on_length else None
        theta, scaling = frequencies(self.rope_config, lengths, batch.positions.device)
        if lengths is None and batch.documents is not None and is_plain(batch.positions):
            # documents in a row repeat their positions, and sines in float64 are slow on a CPU
            different, places = batch.positions.unique(return_inverse=True)
            return rotation_table(different, theta, scaling)[places]
        return rotation_table(batch.positions, theta, scaling)

    def _kernel(self, options: dict[str, Any]) -> str:
        """Name of the attention kernel; only the eager one returns probabilities."""
        chosen = self.config._attn_implementation or "eager"
        if options.get("output_attentions", self.config.output_attentions) and chosen != "eager":
            logger.warning_once(
                f"attn_implementation={chosen!r} returns no attention probabilities; calls with "
                "output_attentions=True are computed by the eager kernel"
            )
            return "eager"
        if self.rope_config.biases_scores and chosen not in ("eager", "sdpa"):
            logger.warning_once(
                f"attn_implementation={chosen!r} adds nothing to scores, and position_encoding "
                f"{self.rope_config.position_encoding} is added there; calls are computed by sdpa"
            )
            return "sdpa"
        return chosen

    def _may_drop_padding(self, options: dict[str, Any]) -> bool:
        """Whether rows may become one row of real tokens for all layers.

        Outputs of single layers are wanted in rows, and compilers want to know the shapes.
        """
        rows = options.get("output_hidden_states", self.config.output_hidden_states)
        return not (rows or torch.compiler.is_compiling())

    def _mask(
        self,
        kernel: str,
        words: Tensor,
        attention_mask: Tensor | None,
        numbers: Tensor | None,
        past_key_values: Cache | None,
    ) -> Any:
        """What the kernel must know of padding, causality and documents, in the form it wants."""
        kernel = "eager" if self.rope_config.biases_scores else kernel  # numbers, to be added to
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
            return _ready_made(kernel, words, attention_mask)
        options: dict[str, Any] = {}
        if numbers is not None:
            options["and_mask_function"] = packed_sequence_mask_function(numbers)
        make: Callable[..., Any] = create_bidirectional_mask
        if self.is_causal:
            make, options["past_key_values"] = create_causal_mask, past_key_values
        return make(self._config_for(kernel), words, attention_mask=attention_mask, **options)

    def _cross_mask(
        self, kernel: str, words: Tensor, source: Tensor | None, attention_mask: Tensor | None
    ) -> Any:
        if source is None or attention_mask is None:
            return None
        if attention_mask.ndim == 4:
            return _ready_made(kernel, words, attention_mask)
        config = self._config_for(kernel)
        return create_bidirectional_mask(
            config, words, attention_mask=attention_mask, encoder_hidden_states=source
        )

    def _config_for(self, kernel: str) -> RoFormerConfig:
        """The configuration with the kernel of this call: masks are made in its form."""
        if kernel == self.config._attn_implementation:
            return self.config
        config = copy.copy(self.config)
        config._attn_implementation = kernel
        return config


def _is_one_row(words: Tensor, attention_mask: Any) -> bool:
    """Whether documents come as kernels for variable lengths want them: nothing is to be done."""
    if attention_mask is not None or words.shape[0] != 1:
        return False
    # without a device kernel the borders are read on the host, which no compiler can follow
    return words.is_cuda or not torch.compiler.is_compiling()


def _no_cache_for_packed_rows(given: Cache | None) -> Cache | None:
    """Nothing can follow a row of several documents, so keys and values are not kept."""
    if given is not None:
        raise ValueError(
            "position_ids must count through one document beside past_key_values, got several "
            "that start from 0; leave the cache out"
        )
    return None


def _linear_cache(given: Cache | None, wanted: bool) -> Cache | None:
    """The cache of linear attention; `generate` hands in an empty one of another kind."""
    if isinstance(given, LinearCache):
        return given
    if given is not None and given.get_seq_length():
        raise ValueError(
            "past_key_values must be a LinearCache with linear_attention, got a "
            f"{type(given).__name__} of {given.get_seq_length()} tokens; leave it out"
        )
    return LinearCache() if wanted or given is not None else None


def _masked(kernel: str, numbers: Tensor | None) -> str:
    """The kernel that takes a mask of documents: flash kernels know borders, and drop masks."""
    if numbers is None or not kernel.startswith("flash"):
        return kernel
    logger.warning_once(
        f"attn_implementation={kernel!r} keeps documents apart in whole rows only; calls with a "
        "cache, cross-attention, output_hidden_states or a compiler are computed by sdpa"
    )
    return "sdpa"


def with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """What is added to scores: a mask, if there is one, and what positions say."""
    return bias if mask is None else mask + bias.to(mask.dtype)


def _ready_made(kernel: str, words: Tensor, mask: Tensor) -> Tensor:
    """A [B or 1, 1 or H, L, S] mask as that kernel takes it: sdpa takes bools, the others sums."""
    if kernel.startswith("flash"):
        raise ValueError(
            f"attention_mask must be [B, S] with attn_implementation={kernel!r}, got shape "
            f"{tuple(mask.shape)}; use sdpa for masks of four dimensions"
        )
    if mask.is_floating_point():
        mask = mask.to(words.dtype)
    else:
        mask = mask.bool()
        if kernel not in ("sdpa", UNPADDED):
            least = torch.finfo(words.dtype).min
            mask = torch.zeros_like(mask, dtype=words.dtype).masked_fill(~mask, least)
    return mask.expand(words.shape[0], -1, -1, -1)
