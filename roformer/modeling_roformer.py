"""RoFormer: a BERT encoder whose self-attention rotates queries and keys by their position.

Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864), sections 3.2 and 3.3. Module and parameter
names are those of transformers' own RoFormer, so that checkpoints load in both directions. In
transformers cos and sin come from a table of `max_position_embeddings` rows; here they are computed
from `position_ids`, and packed documents are kept apart by every attention implementation.

Legend: B batch, L tokens, S keys, E hidden size, H heads, D head size, V vocabulary. Layers may
work on other rows (`batch.Layout`): all tokens in one without padding, or one for each document.
"""

from functools import wraps
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_inputs import AttentionInputs, add_bias_to_mask, prepare_attention
from .batch import BatchMetadata, describe_batch
from .configuration_roformer import RoFormerConfig
from .input_checks import check_ids, check_inputs
from .kernels import AUTO, Dropout, Linear  # nn.Dropout and nn.Linear, faster on a CPU
from .kernels.attention import softmax_attention
from .linear_attention import RandomFeatureMap, RoFormerLinearSelfAttention
from .position_encodings import (
    RelativePositions,
    TransformerXLBias,
    build_position_bias,
    compute_relative_positions,
    sinusoidal_embeddings,
)
from .rotary import apply_rotary, compute_rope_parameters, rotary_embeddings

logger = logging.get_logger(__name__)


def build_norm(config: RoFormerConfig, size: int) -> nn.Module:
    """Create the normalisation that `config.norm_type` names."""
    if config.norm_type == "rms_norm":
        return nn.RMSNorm(size, eps=config.layer_norm_eps, elementwise_affine=False)
    return nn.LayerNorm(size, eps=config.layer_norm_eps, bias=config.use_bias)


class RoFormerEmbeddings(nn.Module):
    """Sum of word and token-type embeddings, normalised.

    Learned and sinusoidal position encodings are added here; all others act in the attention.
    """

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        size = config.embedding_dim
        self.word_embeddings = nn.Embedding(
            config.vocab_size, size, padding_idx=config.pad_token_id
        )
        self.token_type_embeddings = None
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.position_embeddings = None  # BERT's table, not the (cos, sin) argument of the layers
        if config.position_encoding == "learned":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.is_sinusoidal = config.position_encoding == "sinusoidal"
        self.LayerNorm = build_norm(config, size)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        position_ids: Tensor,
    ) -> Tensor:
        """Embed [B, L] ids, or take [B, L, embedding_size] vectors; returns the latter shape."""
        embeddings = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if self.position_embeddings is not None:
            check_ids("position_ids", position_ids, self.position_embeddings.num_embeddings)
            embeddings = embeddings + self.position_embeddings(position_ids)
        elif self.is_sinusoidal:  # scaled to the size of sinusoids: Vaswani et al., section 3.4
            size = embeddings.shape[-1]
            sinusoids = sinusoidal_embeddings(position_ids, size).to(embeddings.dtype)
            embeddings = embeddings * size**0.5 + sinusoids
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(1, dtype=torch.long, device=embeddings.device)
            embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(embeddings))


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T / sqrt(D)) v (equation 2).

    The arguments are those of all attention functions of transformers, with queries [B, H, L, D],
    keys and values [B, H, S, D]. The mask, and the position bias of T5, ALiBi and Transformer-XL
    in it, is added to the scores, [B, H, L, S].

    Returns:
        [B, L, H, D], and the probabilities [B, H, L, S].
    """
    context, probabilities = softmax_attention(query, key, value, attention_mask, scaling, dropout)
    return context.transpose(1, 2), probabilities


class RoFormerSelfAttention(nn.Module):
    """Multi-head attention; with RoPE, scores depend on positions m and n by m - n (equation 16).

    As cross-attention, keys and values come from an encoder and nothing is rotated, because the
    positions of encoder and decoder have no common origin.
    """

    def __init__(
        self, config: RoFormerConfig, layer_idx: int, is_cross_attention: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_cross_attention = is_cross_attention
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.attention_head_size
        self.scaling = config.attention_head_size**-0.5
        self.is_causal = config.is_decoder and not is_cross_attention
        self.relative = None  # Transformer-XL's bias; checkpoints hold its weights under this name
        if config.position_encoding == "transformer_xl" and not is_cross_attention:
            self.relative = TransformerXLBias(config)
        # never called, the attention function takes the rate: a module, so that `eval()` and tools
        # that switch dropout off reach it
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.query = Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.key = Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.value = Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        position_embeddings: tuple[Tensor, Tensor] | None,
        *,
        implementation: str,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Cache | None = None,
        relative_positions: RelativePositions | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the tokens themselves, or to an encoder's.

        Args:
            hidden_states: [B, L, E].
            attention_mask: Mask in the form of the implementation (additive or boolean), or None.
                For T5 and ALiBi it includes the position bias.
            position_embeddings: cos and sin for RoPE, else and for cross-attention None.
            encoder_hidden_states: [B, S, E] for cross-attention, else None.
            past_key_values: Cache of a decoder.
            implementation: Name of the attention implementation, chosen in each call.
            relative_positions: m - n of the tokens, for Transformer-XL.
            **kwargs: Further arguments of the attention function.

        Returns:
            [B, L, E], and from eager attention the probabilities, [B, H, L, S].
        """
        query = self._split_heads(self.query(hidden_states))  # [B, L, H, D]
        if self.relative is not None:
            query, position_bias = self.relative(query, relative_positions)  # query becomes q + u
            attention_mask = add_bias_to_mask(attention_mask, position_bias * self.scaling)
        elif position_embeddings is not None:
            query = self._rotate(query, position_embeddings)
        inputs = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        key, value = self._key_value(inputs, position_embeddings, past_key_values)
        # "auto" and "unpadded": kernels.attention.roformer_attention_forward; transformers searches
        # the source for get_interface to know that attention can be changed
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        context, probabilities = attend(
            self,
            query.transpose(1, 2),  # [B, H, L, D]
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.dropout.p if self.dropout.training else 0.0,
            **kwargs,
        )
        return context.flatten(-2), probabilities

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size)

    def _rotate(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = position_embeddings
        return apply_rotary(x, cos, sin, self.config.rope_interleave)

    def _key_value(
        self,
        inputs: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        past_key_values: Cache | None,
    ) -> tuple[Tensor, Tensor]:
        """Project keys and values, [B, H, S, D], rotate the keys, and append both to cached ones.

        Only RoPE rotates, and values only with `rotary_value`.
        """
        cache = past_key_values
        if isinstance(past_key_values, EncoderDecoderCache):
            cache = past_key_values.self_attention_cache
            if self.is_cross_attention:
                cache = past_key_values.cross_attention_cache
                if past_key_values.is_updated.get(self.layer_idx):
                    layer = cache.layers[self.layer_idx]
                    return layer.keys, layer.values
                past_key_values.is_updated[self.layer_idx] = True
        elif self.is_cross_attention:
            cache = None  # a plain cache holds the keys of the self-attention
        key, value = (self._split_heads(layer(inputs)) for layer in (self.key, self.value))
        if position_embeddings is not None:
            key = self._rotate(key, position_embeddings)
            if self.config.rotary_value:
                value = self._rotate(value, position_embeddings)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        return (key, value) if cache is None else cache.update(key, value, self.layer_idx)


class RoFormerOutput(nn.Module):
    """Projection, dropout, residual sum and normalisation, after attention and feed-forward."""

    def __init__(self, config: RoFormerConfig, input_size: int) -> None:
        super().__init__()
        self.dense = Linear(input_size, config.hidden_size, bias=config.use_bias)
        self.LayerNorm = build_norm(config, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Project [B, L, input_size] and add the residual, [B, L, E]."""
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)


class RoFormerAttention(nn.Module):
    """Self-attention, or cross-attention, with its output layer."""

    def __init__(
        self, config: RoFormerConfig, layer_idx: int, is_cross_attention: bool = False
    ) -> None:
        super().__init__()
        self.self: RoFormerSelfAttention | RoFormerLinearSelfAttention
        if config.linear_attention is None:
            self.self = RoFormerSelfAttention(config, layer_idx, is_cross_attention)
        else:
            self.self = RoFormerLinearSelfAttention(config)
        self.output = RoFormerOutput(config, config.hidden_size)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[B, L, E] to [B, L, E]; arguments as in `RoFormerSelfAttention.forward`."""
        # the probabilities of `output_attentions` are recorded by `_can_record_outputs`
        context, _ = self.self(hidden_states, *args, **kwargs)
        return self.output(context, hidden_states)


class RoFormerIntermediate(nn.Module):
    """First layer of the feed-forward block, and its activation."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.intermediate_act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, L, E] to [B, L, intermediate_size]."""
        return self.intermediate_act_fn(self.dense(hidden_states))


class RoFormerLayer(GradientCheckpointingLayer):
    """Self-attention, in a decoder cross-attention, and feed-forward; post-norm as in BERT."""

    def __init__(self, config: RoFormerConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = RoFormerAttention(config, layer_idx)
        if config.add_cross_attention:
            self.crossattention = RoFormerAttention(config, layer_idx, is_cross_attention=True)
        self.intermediate = RoFormerIntermediate(config)
        self.output = RoFormerOutput(config, config.intermediate_size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        position_embeddings: tuple[Tensor, Tensor] | None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, L, E] to [B, L, E]; other arguments as in `RoFormerSelfAttention.forward`.

        `encoder_attention_mask` is the mask of the cross-attention, in the same form.
        """
        attention_output = self.attention(
            hidden_states, attention_mask, position_embeddings, **kwargs
        )
        if encoder_hidden_states is not None:
            attention_output = self.crossattention(
                attention_output,
                encoder_attention_mask,
                None,  # nothing is rotated
                encoder_hidden_states=encoder_hidden_states,
                **kwargs,
            )
        return self.output(self.intermediate(attention_output), attention_output)


class RoFormerEncoder(nn.Module):
    """Stack of layers."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            RoFormerLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.register_load_state_dict_pre_hook(_drop_sinusoid_table)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        position_embeddings: tuple[Tensor, Tensor] | None,
        encoder_hidden_states: Tensor | None,
        encoder_attention_mask: Any,
        **kwargs: Any,
    ) -> Tensor:
        """[B, L, E] to [B, L, E]; all other arguments go to every layer.

        `kwargs` are `implementation`, `relative_positions` and `past_key_values`, which
        `RoFormerSelfAttention` reads, and arguments of the attention function.
        """
        # positional: reentrant checkpointing passes no gradient to keyword arguments
        shared = attention_mask, position_embeddings, encoder_hidden_states, encoder_attention_mask
        for layer in self.layer:
            hidden_states = layer(hidden_states, *shared, **kwargs)
        return hidden_states


def _drop_sinusoid_table(
    encoder: nn.Module, state: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Remove transformers' table of sines from a state dict: here sines are computed."""
    state.pop(f"{prefix}embed_positions.weight", None)


class RoFormerPredictionHeadTransform(nn.Module):
    """Dense layer, activation and normalisation before the projection to the vocabulary."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        size = config.embedding_dim
        self.dense = Linear(config.hidden_size, size, bias=config.use_bias)
        self.transform_act_fn = ACT2FN[config.hidden_act]
        self.LayerNorm = build_norm(config, size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] to [..., embedding_size]."""
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


class RoFormerLMPredictionHead(nn.Module):
    """Projection to the vocabulary; its weight is tied to the word embeddings in heads.py."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.transform = RoFormerPredictionHeadTransform(config)
        self.decoder = Linear(config.embedding_dim, config.vocab_size, bias=config.use_bias)
        if config.use_bias:
            # second name of decoder.bias in checkpoints, tied by `_tied_weights_keys` in heads.py;
            # where word embeddings are not tied it is unused, as in transformers
            self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] to [..., V]."""
        return self.decoder(self.transform(hidden_states))


class RoFormerOnlyMLMHead(nn.Module):
    """Wrapper that names the parameters `cls.predictions...`, as in transformers' BERT."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.predictions = RoFormerLMPredictionHead(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] to [..., V]."""
        return self.predictions(hidden_states)


class RoFormerPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation of all RoFormer models.

    `from_pretrained` and `save_pretrained` are transformers'. `attn_implementation` may be eager,
    sdpa, flex_attention, flash_attention_2, `unpadded` (leaves padding out and needs no other
    library) or `auto`, the default: the fastest exact one for each call. flash_attention_2 has not
    been run with the flash-attn library.
    """

    config: RoFormerConfig
    loss_name: str | None = None
    """transformers' name of the loss. Without it transformers searches the name of the class, which
    finds nothing in a subclass of another name."""
    base_model_prefix = "roformer"
    _input_embed_layer = "word_embeddings"
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
    # transformers saves its table of sines: `from_pretrained` ignores it by this, and
    # `load_state_dict` by the hook of RoFormerEncoder
    _keys_to_ignore_on_load_unexpected = [r"encoder\.embed_positions\.weight"]  # noqa: RUF012

    def __init__(self, config: RoFormerConfig, *args: Any, **kwargs: Any) -> None:
        config = _convert_config(config)
        config.check()  # fields may have been edited
        super().__init__(config, *args, **kwargs)
        if self.loss_name is not None:
            self.loss_type = self.loss_name

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        """Return the name of the attention implementation; `auto` if none was requested."""
        return super().get_correct_attn_implementation(requested_attention or AUTO, is_init_check)

    def train(self, mode: bool = True) -> Self:
        """Set training mode; see `nn.Module.train`. Warns once of half-precision weights."""
        if mode and not self.training:  # Trainer calls this at every step
            dtypes = {p.dtype for p in self.parameters() if p.requires_grad}
            if dtypes & {torch.bfloat16, torch.float16}:
                logger.warning_once(
                    "weights in half precision are trained: updates smaller than their spacing are "
                    "lost, unless the optimizer keeps a float32 copy; load the model with "
                    "dtype=torch.float32 and train it under autocast"
                )
        return super().train(mode)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RoFormerLMPredictionHead) and hasattr(module, "bias"):
            nn.init.zeros_(module.bias)
        if isinstance(module, RandomFeatureMap | TransformerXLBias):
            module.reset_parameters()


def _convert_config(config: PreTrainedConfig) -> RoFormerConfig:
    """Return a `RoFormerConfig`, made of the same fields if transformers' class is given."""
    if isinstance(config, RoFormerConfig):
        return config
    if getattr(config, "model_type", None) != RoFormerConfig.model_type:
        found = f"{type(config).__module__}.{type(config).__name__}"
        raise ValueError(f"config must be a RoFormerConfig, got {found}; make one of its fields")
    own = RoFormerConfig.from_dict(config.to_dict())
    own._attn_implementation = config._attn_implementation
    return own


def _mend_capture_outputs(forward: Any) -> Any:
    """Mend two habits of `capture_outputs`.

    It returns an empty tuple where no layer has cross-attention, and takes an option given as None
    for False instead of the configuration's.
    """

    @wraps(forward)
    def wrapper(self: "RoFormerModel", *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        outputs = forward(self, *args, **kwargs)
        if isinstance(outputs, tuple):
            return outputs[:-1] if outputs[-1] == () else outputs
        if outputs.cross_attentions == ():
            kept = {name: x for name, x in outputs.items() if name != "cross_attentions"}
            outputs = type(outputs)(**kept)
        return outputs

    return wrapper


class RoFormerModel(RoFormerPreTrainedModel):
    """The encoder, or with `config.is_decoder` the decoder, without a head."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        config = self.config  # converted from transformers' class
        self.embeddings = RoFormerEmbeddings(config)
        self.embeddings_project = None
        if config.embedding_dim != config.hidden_size:
            self.embeddings_project = Linear(
                config.embedding_dim, config.hidden_size, bias=config.use_bias
            )
        self.encoder = RoFormerEncoder(config)
        self.score_bias = build_position_bias(config)  # checkpoints hold its weights by this name
        # EncoderDecoderModel overwrites `self.config` with transformers' class, which lacks our
        # fields; only options of calls, as `_attn_implementation` or `output_...`, are read there
        self.roformer_config = config
        self.post_init()

    @merge_with_config_defaults
    @_mend_capture_outputs
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        unpad: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Encode tokens.

        Documents packed into one row do not attend to each other if `cu_seq_lens_q` is given;
        their outputs are those of separate rows. Without it, the documents of a batch of one row
        are read from `position_ids` that count from 0 for each of them, as transformers'
        `DataCollatorWithFlattening` makes them.

        Args:
            input_ids: [B, L] token ids, int32 or int64.
            attention_mask: [B, S], 1 for tokens and 0 for padding, where S includes cached tokens;
                or [B or 1, 1 or H, L or 1, S], bool (True attends) or float (added to the scores),
                which is used as it is, without causality or documents.
            token_type_ids: [B, L] or [1, L] segments; None means all 0.
            inputs_embeds: [B, L, embedding_size] in place of `input_ids`.
            encoder_hidden_states: [B, S', E] for the cross-attention of a decoder.
            encoder_attention_mask: [B, S'], its padding mask.
            past_key_values: Cache of earlier calls of a decoder.
            use_cache: Return a cache; the default of a decoder is its configuration's.
            position_ids: [L] or [B, L] integers with any start, order and gaps. None: with
                `cu_seq_lens_q` counted from 0 in each document, otherwise the column plus the
                number of cached tokens. Columns count padding on the left, which shifts learned and
                sinusoidal positions. With cached tokens, encodings with a position bias count from
                the start of the cache, whatever they are.
            cu_seq_lens_q: [documents + 1] int32 or int64, cumulative lengths of the documents in
                the flattened rows, each of which ends a document. [0, L] makes one document of a
                row, whatever its `position_ids` are.
            max_length_q: Length of the longest document.
            unpad: Whether the implementations `auto` and `unpadded` may leave padding out, where
                `last_hidden_state` is then 0. None: they may, and `auto` warns; True: they may,
                without a warning; False: they may not.
            **kwargs: transformers' `output_hidden_states`, `output_attentions` (computed by eager
                attention) and `return_dict`.

        Returns:
            `last_hidden_state` [B, L, E], and what was requested.

        Raises:
            ValueError: Arguments contradict each other or the configuration. Ids outside the
                vocabulary are noticed on a CPU only, because other devices would have to be waited
                for.
        """
        config = self.roformer_config
        check_inputs(
            config,
            self.embeddings.word_embeddings,  # may have been resized
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            cache=past_key_values,
            position_ids=position_ids,
            cu_seqlens=cu_seq_lens_q,
            is_causal=kwargs.pop("is_causal", None),  # checked only: layers have their own
        )
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        batch = describe_batch(
            cast(Tensor, input_ids if inputs_embeds is None else inputs_embeds),
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seq_lens_q,
            max_seqlen=max_length_q,
            past_length=past_length,
            cache_given=past_key_values is not None,
        )
        cache = self._prepare_cache(past_key_values, use_cache, encoder_hidden_states, batch)

        # 1. embed
        hidden_states = self.embeddings(
            input_ids, token_type_ids, inputs_embeds, batch.position_ids
        )
        if self.embeddings_project is not None:
            hidden_states = self.embeddings_project(hidden_states)
        # 2. position bias, for the encodings that add one to the scores
        relative_positions = compute_relative_positions(
            config, batch.position_ids, past_length, positions_are_default=position_ids is None
        )
        position_bias = None if self.score_bias is None else self.score_bias(relative_positions)
        # 3. mask or lengths of documents, in the form of the attention implementation
        attention_inputs = prepare_attention(
            config=config,
            requested=self.config._attn_implementation or "eager",  # None in EncoderDecoderModel
            output_attentions=kwargs.get("output_attentions", self.config.output_attentions),
            output_hidden_states=kwargs.get(
                "output_hidden_states", self.config.output_hidden_states
            ),
            hidden_states=hidden_states,
            batch=batch,
            layers=self.encoder,
            cache=cache,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            position_bias=position_bias,
            unpad=unpad,
        )
        # 4. layout of the layers: one row without padding, or a row for each document
        hidden_states = attention_inputs.to_layout(hidden_states)
        position_embeddings = self._cos_sin(batch, attention_inputs, hidden_states.dtype)
        # 5. encoder
        hidden_states = self.encoder(
            hidden_states,
            attention_inputs.attention_mask,
            position_embeddings,
            encoder_hidden_states,
            attention_inputs.encoder_attention_mask,
            past_key_values=cache,
            implementation=attention_inputs.implementation,
            relative_positions=relative_positions,
            **(kwargs | attention_inputs.attention_kwargs),
        )
        # 6. back to the rows of the batch
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=attention_inputs.to_batch(hidden_states), past_key_values=cache
        )

    def _cos_sin(
        self, batch: BatchMetadata, attention_inputs: AttentionInputs, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """Compute cos and sin for RoPE in the rows of the layout; None for other encodings.

        Computed from the configuration in every call: a buffer would be cast by `.bfloat16()`,
        uninitialised after loading on the meta device, and wrong after an edit of the
        configuration.
        """
        config = self.roformer_config
        if config.position_encoding != "rope":
            return None
        position_ids = batch.position_ids
        seq_len = batch.position_span_of_each_token() if config.has_dynamic_rope else None
        inv_freq, attention_scaling = compute_rope_parameters(config, seq_len, position_ids.device)
        cos, sin = rotary_embeddings(position_ids, inv_freq, attention_scaling, dtype)
        return attention_inputs.to_layout(cos), attention_inputs.to_layout(sin)

    @property
    def recomputes_layers(self) -> bool:
        """Whether gradient checkpointing is at work, under which layers see no cache."""
        layers = self.encoder.layer
        return self.training and any(getattr(x, "gradient_checkpointing", False) for x in layers)

    def _prepare_cache(
        self,
        past_key_values: Cache | None,
        use_cache: bool | None,
        encoder_hidden_states: Tensor | None,
        batch: BatchMetadata,
    ) -> Cache | None:
        """Return the given cache, a new one if the call is to return one, or None.

        Packed rows have none: their next token belongs to no known document. While compiling, a
        row with `position_ids` only may be packed or not; it keeps its cache.
        """
        config, is_packed = self.roformer_config, batch.packed_document_ids is not None
        if past_key_values is not None:
            if self.recomputes_layers:
                raise ValueError(
                    "past_key_values must be None under gradient checkpointing in training mode, "
                    "got a cache; call eval()"
                )
            if is_packed:
                name = "position_ids" if batch.cu_seqlens is None else "cu_seq_lens_q"
                raise ValueError(
                    f"{name} must not describe documents beside past_key_values, got both; leave "
                    "one of them out"
                )
            return past_key_values
        if batch.cu_seqlens is None and torch.compiler.is_compiling():
            is_packed = False  # not known
        has_cache = config.is_decoder and config.has_cache and not self.recomputes_layers
        if is_packed or not (use_cache and has_cache):
            return None
        cache = DynamicCache(config=config)
        if encoder_hidden_states is None:
            return cache
        return EncoderDecoderCache(cache, DynamicCache(config=config))
