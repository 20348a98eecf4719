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
from transformers.generation import GenerationMixin
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from . import documents
from .attention import UNPADDED, eager_attention
from .configuration_roformer import RoFormerConfig
from .rotary import frequencies, half_split_order, rotate, rotation_table

logger = logging.get_logger(__name__)


def _embedding_width(config: RoFormerConfig) -> int:
    return config.embedding_size or config.hidden_size


def _norm(config: RoFormerConfig, width: int) -> nn.Module:
    if config.norm_type == "rms_norm":
        return nn.RMSNorm(width, eps=config.layer_norm_eps, elementwise_affine=False)
    return nn.LayerNorm(width, eps=config.layer_norm_eps, bias=config.use_bias)


class RoFormerEmbeddings(nn.Module):
    """Word and token-type embeddings, normalised; no positions: they enter in the attention."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        width = _embedding_width(config)
        self.word_embeddings = nn.Embedding(
            config.vocab_size, width, padding_idx=config.pad_token_id
        )
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = _norm(config, width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, input_ids: Tensor | None, token_type_ids: Tensor | None, inputs_embeds: Tensor | None
    ) -> Tensor:
        """[B, L] ids, or [B, L, embedding_size] vectors, to [B, L, embedding_size]."""
        words = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if hasattr(self, "token_type_embeddings"):
            if token_type_ids is None:
                # everything is segment 0: no gather needed
                words = words + self.token_type_embeddings.weight[0]
            else:
                words = words + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(words))


class RoFormerSelfAttention(nn.Module):
    """Multi-head attention whose scores know positions m and n by m - n only (equation 16).

    As cross-attention, keys and values come from an encoder and nothing is rotated: its positions
    and the decoder's have no common origin.
    """

    def __init__(self, config: RoFormerConfig, layer_idx: int, crosses: bool = False) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.crosses = crosses
        self.scaling = config.head_width**-0.5
        self.is_causal = config.is_decoder and not crosses
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.key = nn.Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.value = nn.Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        rotation: Tensor,
        source: Tensor | None,
        past_key_values: Cache | None,
        implementation: str,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, L, E] to [B, L, E] and, from the eager kernel, probabilities [B, H, L, S]."""
        heads = (*hidden_states.shape[:-1], -1, self.config.head_width)
        q = self.query(hidden_states).view(heads)  # [B, L, H, D]
        if not self.crosses:
            q = rotate(q, rotation, self.config.rope_interleave)
        k, v = self._keys_and_values(
            hidden_states if source is None else source, rotation, past_key_values
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

    def _keys_and_values(
        self, source: Tensor, rotation: Tensor, past_key_values: Cache | None
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
        heads = (*source.shape[:-1], -1, self.config.head_width)
        k, v = self.key(source).view(heads), self.value(source).view(heads)
        if not self.crosses:
            k = rotate(k, rotation, self.config.rope_interleave)
            if self.config.rotary_value:
                v = rotate(v, rotation, self.config.rope_interleave)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return (k, v) if cache is None else cache.update(k, v, self.layer_idx)


class RoFormerResidual(nn.Module):
    """Projection, dropout, sum with the input, normalisation: how both halves of a layer end."""

    def __init__(self, config: RoFormerConfig, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size, bias=config.use_bias)
        self.LayerNorm = _norm(config, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, x: Tensor, residual: Tensor, again: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """[B, L, width] and [B, L, E] to [B, L, E].

        With `again`, which computes x, x itself is not kept for the backward pass.
        """
        if again is None or not torch.is_grad_enabled():
            projected = self.dense(x)
        else:
            with _recomputed(x, again):
                projected = self.dense(x)
        return self.LayerNorm(self.dropout(projected) + residual)


@contextmanager
def _recomputed(x: Tensor, again: Callable[[], Tensor]) -> Iterator[None]:
    """Within, `x` is not kept for the backward pass but computed again there.

    Used for the activation: it is cheap, and its input is kept in any case. Without its output a
    layer keeps 14 instead of 18 times [B, L, E] of a base model, for under 2 % of the time.
    """

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        if tensor.untyped_storage()._cdata != x.untyped_storage()._cdata:
            return tensor
        shape = tensor.shape
        return lambda: again().view(shape)

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


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

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        rotation: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, L, E] to [B, L, E]."""
        attended = self.attention(
            hidden_states, attention_mask, rotation, None, past_key_values, **kwargs
        )
        if encoder_hidden_states is not None:
            attended = self.crossattention(
                attended,
                encoder_attention_mask,
                rotation,
                encoder_hidden_states,
                past_key_values,
                **kwargs,
            )
        before, after = self.intermediate(attended)
        # compilers choose what to keep by themselves, and checkpointing keeps none of it
        if self.gradient_checkpointing or torch.compiler.is_compiling():
            return self.output(after, attended)
        again = partial(self.intermediate.intermediate_act_fn, before)
        return self.output(after, attended, again)


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

    @torch.no_grad()
    def set_rope_interleave(self, interleave: bool) -> None:
        """Convert the weights to the other pairing of coordinates; every output stays as it was.

        The rows of queries and keys (and of values, and the columns that read them, under
        `rotary_value`) are permuted, which loses nothing: converted back they are the same bits.

        Args:
            interleave: True for adjacent pairs, the paper's; False for coordinates i and i + D/2,
                so that kernels written for Llama run these weights.
        """
        if interleave == self.config.rope_interleave:
            return
        order = half_split_order(self.config.head_width, self.config.rotated_width)
        order = order.argsort() if interleave else order
        for module in self.modules():
            if isinstance(module, RoFormerAttention) and not module.self.crosses:
                attention = module.self
                turned = [attention.query, attention.key]
                if self.config.rotary_value:
                    turned.append(attention.value)
                    _permute(module.output.dense.weight, order, dim=1)
                for linear in turned:
                    for parameter in linear.parameters():
                        _permute(parameter, order, dim=0)
        self.config.rope_interleave = interleave


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
        # EncoderDecoderModel replaces `config` by one of stock's class, without rope settings
        self.rope_config = config
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
                ready-made [B or 1, 1 or H, L, S], bool (True is seen) or floats added to scores.
            token_type_ids: [B, L] segments; None means all 0.
            position_ids: [L] or [B, L] integers, any start, order and gaps; None counts from 0, or
                from the end of the cache.
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
        _check_inputs(self.config, input_ids, inputs_embeds, token_type_ids, position_ids)
        words = self._embed(input_ids, token_type_ids, inputs_embeds)
        given, past_key_values = (
            past_key_values,
            self._cache(past_key_values, use_cache, encoder_hidden_states),
        )
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        if encoder_hidden_states is not None and not self.config.add_cross_attention:
            raise ValueError(
                "encoder_hidden_states must be None without cross-attention, got a tensor; set "
                "is_decoder=True and add_cross_attention=True in the configuration"
            )
        _check_masks(words, start, attention_mask, encoder_hidden_states, encoder_attention_mask)
        batch = documents.arrange(
            words, start, attention_mask, position_ids, cu_seq_lens_q, detect=given is None
        )
        kernel = self._kernel(kwargs)
        rotation = self._rotation(batch)
        layout, told = None, {}
        by_borders = kernel == UNPADDED or kernel.startswith("flash")
        if by_borders and past_key_values is None and encoder_hidden_states is None:
            if cu_seq_lens_q is not None and _is_one_row(words, attention_mask):
                told = documents.kernel_options(cu_seq_lens_q, max_length_q)
            elif batch.real is not None and self._may_drop_padding(kwargs):
                layout = documents.unpad(batch.real, batch.documents)
                rotation = layout.pack(rotation.expand(*words.shape[:2], -1, -1))
                words = layout.pack(words)
                told = documents.kernel_options(layout.borders, layout.longest)
        mask = None
        if not told:
            mask = self._mask(kernel, words, attention_mask, batch.documents, past_key_values)
        hidden_states = self.encoder(
            words,
            mask,
            rotation,
            encoder_hidden_states,
            self._cross_mask(kernel, words, encoder_hidden_states, encoder_attention_mask),
            past_key_values=past_key_values,
            implementation=kernel,
            **(kwargs | told),
        )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states if layout is None else layout.unpack(hidden_states),
            past_key_values=past_key_values,
        )

    def _embed(
        self, input_ids: Tensor | None, token_type_ids: Tensor | None, inputs_embeds: Tensor | None
    ) -> Tensor:
        embedded = self.embeddings(input_ids, token_type_ids, inputs_embeds)
        if self.config.embedding_size == self.config.hidden_size:
            return embedded
        return self.embeddings_project(embedded)

    def _cache(
        self, given: Cache | None, use_cache: bool | None, encoder_hidden_states: Tensor | None
    ) -> Cache | None:
        if given is not None and self.rope_config.depends_on_length:
            raise ValueError(
                "past_key_values must be None where the rotation depends on the length, because "
                "cached keys were turned for a shorter row, got a cache; set use_cache=False"
            )
        if given is not None or not (use_cache and self.config.is_decoder):
            return given
        own = DynamicCache(config=self.config)
        if encoder_hidden_states is None:
            return own
        return EncoderDecoderCache(own, DynamicCache(config=self.config))

    def _rotation(self, batch: documents.Batch) -> Tensor:
        """Cosines and sines of this call, [1 or B, L, D'/2, 2], float32, for all layers.

        Computed from the configuration on every call: a buffer would be cast by `.bfloat16()`, left
        uninitialised by a load on the meta device, and wrong after an edit of the configuration.
        """
        lengths = batch.lengths() if self.rope_config.depends_on_length else None
        theta, scaling = frequencies(self.rope_config, lengths, batch.positions.device)
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
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
            return _ready_made(kernel, words, attention_mask)
        options: dict[str, Any] = {}
        if numbers is not None:
            options["and_mask_function"] = packed_sequence_mask_function(numbers)
        make: Callable[..., Any] = create_bidirectional_mask
        if self.config.is_decoder:
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


def _check_inputs(
    config: RoFormerConfig,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
) -> None:
    if (input_ids is None) == (inputs_embeds is None):
        found = "neither" if input_ids is None else "both"
        raise ValueError(f"exactly one of input_ids and inputs_embeds must be given, got {found}")
    if torch.compiler.is_compiling():
        return
    rows: tuple[int, ...] = ()
    if inputs_embeds is not None:
        _require_shape("inputs_embeds", inputs_embeds, (None, None, _embedding_width(config)))
        rows = tuple(inputs_embeds.shape[:2])
    if input_ids is not None:
        _require_shape("input_ids", input_ids, (None, None))
        _require_ids("input_ids", input_ids, config.vocab_size)
        rows = tuple(input_ids.shape)
    if token_type_ids is not None:
        _require_shape("token_type_ids", token_type_ids, (rows[0], 1), rows)
        _require_ids("token_type_ids", token_type_ids, max(config.type_vocab_size, 1))
    if position_ids is not None:
        _require_shape("position_ids", position_ids, (rows[1],), (1, rows[1]), rows)
        if position_ids.is_floating_point():
            raise ValueError(f"position_ids must be integers, got {position_ids.dtype}")


def _check_masks(
    words: Tensor,
    start: Any,
    attention_mask: Any,
    encoder_hidden_states: Tensor | None,
    encoder_attention_mask: Tensor | None,
) -> None:
    if torch.compiler.is_compiling():
        return
    B, L, _ = words.shape  # noqa: N806
    if isinstance(attention_mask, Tensor):
        ready = ((B, None, L, None), (1, None, L, None))
        _require_shape("attention_mask", attention_mask, (B, L + int(start)), *ready)
    if encoder_hidden_states is not None and encoder_attention_mask is not None:
        S = encoder_hidden_states.shape[1]  # noqa: N806
        whole = ((B, None, L, S), (1, None, L, S))
        _require_shape("encoder_attention_mask", encoder_attention_mask, (B, S), *whole)


def _require_shape(name: str, tensor: Tensor, *allowed: tuple[int | None, ...]) -> None:
    """None stands for any size."""
    shape = tuple(tensor.shape)
    for sizes in allowed:
        if len(sizes) == len(shape) and all(a in (None, b) for a, b in zip(sizes, shape)):
            return
    options = " or ".join(str(list(sizes)).replace("None", "any") for sizes in allowed)
    raise ValueError(f"{name} must have the shape {options}, got {list(shape)}")


def _require_ids(name: str, ids: Tensor, size: int) -> None:
    """Looked at on a CPU only: elsewhere the step would wait for the device."""
    if ids.device.type != "cpu" or not ids.numel():
        return
    least, most = ids.aminmax()
    if least < 0 or most >= size:
        found = int(least if least < 0 else most)
        raise ValueError(f"{name} must be at least 0 and below {size}, got {found}")


class RoFormerForMaskedLM(RoFormerPreTrainedModel):
    """RoFormer with the masked-language-modelling head."""

    _tied_weights_keys = {  # noqa: RUF012 transformers' type
        "cls.predictions.decoder.bias": "cls.predictions.bias",
        "cls.predictions.decoder.weight": "roformer.embeddings.word_embeddings.weight",
    }

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        self.roformer = RoFormerModel(config)
        self.cls = RoFormerOnlyMLMHead(config)
        if not config.use_bias:
            self._tied_weights_keys = _without_bias(self._tied_weights_keys)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The decoder."""
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the decoder."""
        _set_decoder(self.cls.predictions, new_embeddings)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        sparse_prediction: bool = False,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Score the vocabulary at every token, or at the labelled ones only.

        Args:
            input_ids: As `RoFormerModel.forward`, like all but the last three.
            attention_mask: [B, L] or [B, 1, L, L].
            token_type_ids: [B, L].
            position_ids: [L] or [B, L].
            inputs_embeds: [B, L, embedding_size].
            encoder_hidden_states: [B, S, E].
            encoder_attention_mask: [B, S].
            labels: [B, L] original ids where a token was masked, -100 elsewhere.
            sparse_prediction: Compute scores where `labels` is not -100 and nowhere else: the same
                loss for a sixth of the head's arithmetic at the usual 15 %.
            **kwargs: As `RoFormerModel.forward`, and `num_items_in_batch` of transformers' losses.

        Returns:
            `logits` [B, L, V], or with `sparse_prediction` [n, V] in reading order; `loss`, the
            mean over labelled tokens, when `labels` are given.

        Raises:
            ValueError: `sparse_prediction` without `labels`.
        """
        if sparse_prediction and labels is None:
            raise ValueError("labels must be given with sparse_prediction, got None")
        outputs = self.roformer(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            encoder_hidden_states,
            encoder_attention_mask,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if sparse_prediction and labels is not None:
            labelled = labels != -100
            hidden_states, labels = hidden_states[labelled], labels[labelled]
        logits = self.cls(hidden_states)
        return MaskedLMOutput(
            loss=_loss(self, logits, labels, vocab_size=self.config.vocab_size, **kwargs),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class RoFormerForCausalLM(RoFormerPreTrainedModel, GenerationMixin):
    """RoFormer with a language-modelling head that predicts the next token.

    It attends to earlier tokens only, whatever `config.is_decoder` says: its own copy of the
    configuration says True.
    """

    _tied_weights_keys = RoFormerForMaskedLM._tied_weights_keys

    def __init__(self, config: RoFormerConfig) -> None:
        if not config.is_decoder:
            config = copy.deepcopy(config)
            config.is_decoder = True
        super().__init__(config)
        self.roformer = RoFormerModel(config)
        self.cls = RoFormerOnlyMLMHead(config)
        if not config.use_bias:
            self._tied_weights_keys = _without_bias(self._tied_weights_keys)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The decoder over the vocabulary."""
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the decoder over the vocabulary."""
        _set_decoder(self.cls.predictions, new_embeddings)

    @can_return_tuple
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
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """Score the next token at every token.

        Args:
            input_ids: As `RoFormerModel.forward`, like all but `labels` and `logits_to_keep`.
            attention_mask: [B, S] or [B, 1, L, S].
            token_type_ids: [B, L].
            position_ids: [L] or [B, L].
            inputs_embeds: [B, L, embedding_size].
            encoder_hidden_states: [B, S, E].
            encoder_attention_mask: [B, S].
            past_key_values: Keys and values of earlier calls.
            labels: [B, L] the ids of `input_ids` (the shift is made here), -100 for none.
            use_cache: Return keys and values for the next call.
            logits_to_keep: Scores of that many last tokens, or of the tokens indexed; 0 is all.
            **kwargs: As `RoFormerModel.forward`, and `num_items_in_batch` of transformers' losses.

        Returns:
            `logits` [B, L, V]; `loss`, the mean over labelled tokens, when `labels` are given;
            `past_key_values`.
        """
        outputs = self.roformer(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            encoder_hidden_states,
            encoder_attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.cls(outputs.last_hidden_state[:, kept])
        return CausalLMOutputWithCrossAttentions(
            loss=_loss(self, logits, labels, vocab_size=self.config.vocab_size, **kwargs),
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )


def _set_decoder(head: RoFormerLMPredictionHead, decoder: nn.Linear) -> None:
    head.decoder = decoder
    if decoder.bias is not None:
        head.bias = decoder.bias


def _without_bias(tied: dict[str, str]) -> dict[str, str]:
    return {name: source for name, source in tied.items() if not name.endswith("bias")}


def _loss(
    model: RoFormerPreTrainedModel, logits: Tensor, labels: Tensor | None, **kwargs: Any
) -> Tensor | None:
    """The loss that transformers has for this head, in float32."""
    return None if labels is None else model.loss_function(logits=logits, labels=labels, **kwargs)


class RoFormerClassificationHead(nn.Module):
    """Dense, activation, projection to the labels, with dropout before each projection."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, summary: Tensor) -> Tensor:
        """[B, E] to [B, labels]."""
        x = self.activation(self.dense(self.dropout(summary)))
        return self.out_proj(self.dropout(x))


class RoFormerForSequenceClassification(RoFormerPreTrainedModel):
    """RoFormer with a head over the first token, for classification (GLUE) or regression."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.roformer = RoFormerModel(config)
        self.classifier = RoFormerClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Score the labels of each sequence.

        Args:
            input_ids: As `RoFormerModel.forward`, like all but `labels`.
            attention_mask: [B, L]; with padding on the left the first real token is read.
            token_type_ids: [B, L].
            position_ids: [L] or [B, L].
            inputs_embeds: [B, L, embedding_size].
            labels: [B] class ids, [B] values for a regression, [B, labels] for several labels.
            **kwargs: As `RoFormerModel.forward`.

        Returns:
            `logits` [B, labels]; `loss` when `labels` are given.
        """
        outputs = self.roformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
        )
        logits = self.classifier(_summary(outputs.last_hidden_state, attention_mask, "first"))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _summary(hidden_states: Tensor, attention_mask: Tensor | None, which: str) -> Tensor:
    """The first or last unmasked token of each row, [B, E], by a [B, L] mask if there is one."""
    if attention_mask is None or attention_mask.ndim != 2:
        return hidden_states[:, 0 if which == "first" else -1]
    real = attention_mask.to(torch.int32)
    # argmax gives the first of equal values
    place = real.argmax(-1) if which == "first" else real.cumsum(-1).argmax(-1)
    return hidden_states[torch.arange(place.shape[0], device=place.device), place]


class RoFormerForMultipleChoice(RoFormerPreTrainedModel):
    """RoFormer with a score for each of several choices, read off one token of each.

    `config.summary_type` says which: the first or the last unmasked one.
    """

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        self.roformer = RoFormerModel(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """Score the choices.

        Args:
            input_ids: [B, choices, L], as are the mask, the types and the positions.
            attention_mask: [B, choices, L].
            token_type_ids: [B, choices, L].
            position_ids: [B, choices, L], or [L] for all.
            inputs_embeds: [B, choices, L, embedding_size].
            labels: [B] number of the right choice.
            **kwargs: As `RoFormerModel.forward`.

        Returns:
            `logits` [B, choices]; `loss` when `labels` are given.

        Raises:
            ValueError: `input_ids` has another number of dimensions.
        """
        if input_ids is not None:
            _require_shape("input_ids", input_ids, (None, None, None))
        if inputs_embeds is not None:
            _require_shape("inputs_embeds", inputs_embeds, (None, None, None, None))
        flat = [
            x if x is None or x.ndim < 3 else x.flatten(0, 1)
            for x in (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        ]
        outputs = self.roformer(*flat, **kwargs)
        summary = _summary(outputs.last_hidden_state, flat[1], self.config.summary_type)
        choices = (inputs_embeds if input_ids is None else input_ids).shape[1]  # type: ignore
        logits = self.classifier(summary).view(-1, choices)
        return MultipleChoiceModelOutput(
            loss=None if labels is None else nn.functional.cross_entropy(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class RoFormerForTokenClassification(RoFormerPreTrainedModel):
    """RoFormer with a label for every token, for tagging and named entities."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.roformer = RoFormerModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Score the labels of each token.

        Args:
            input_ids: As `RoFormerModel.forward`, like all but `labels`.
            attention_mask: [B, L] or [B, 1, L, L].
            token_type_ids: [B, L].
            position_ids: [L] or [B, L].
            inputs_embeds: [B, L, embedding_size].
            labels: [B, L] class ids, -100 for tokens without one.
            **kwargs: As `RoFormerModel.forward`.

        Returns:
            `logits` [B, L, labels]; `loss`, the mean over labelled tokens, when `labels` are given.
        """
        outputs = self.roformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        return TokenClassifierOutput(
            loss=_loss(self, logits, labels, config=self.config),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class RoFormerForQuestionAnswering(RoFormerPreTrainedModel):
    """RoFormer with a start and an end of the answer in the text, as for SQuAD."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        self.roformer = RoFormerModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Score every token as the start and as the end of the answer.

        Args:
            input_ids: As `RoFormerModel.forward`, like all but the last two.
            attention_mask: [B, L] or [B, 1, L, L].
            token_type_ids: [B, L].
            position_ids: [L] or [B, L].
            inputs_embeds: [B, L, embedding_size].
            start_positions: [B] token where the answer starts; one beyond the text is left out.
            end_positions: [B] token where it ends; likewise.
            **kwargs: As `RoFormerModel.forward`.

        Returns:
            `start_logits` and `end_logits` [B, L]; `loss`, the mean of both, when both are given.
        """
        outputs = self.roformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
        )
        start, end = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start,
            end_logits=end,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
