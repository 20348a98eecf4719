"""RoFormer: a BERT encoder whose self-attention rotates queries and keys by their position.

Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864), sections 3.2 and 3.3. Module and parameter
names are those of transformers' own RoFormer, so that checkpoints pass both ways. What differs is
that positions come from `position_ids`, angles stay exact, the table of rotations is made
once a forward pass in the form that all layers use, and every attention kernel works, with
documents in packed rows kept apart.

Legend: B batch, L tokens, S keys, E width, H heads, D head width, V vocabulary.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from . import kernels
from . import padding as documents
from .attention_masks import (
    cross_mask,
    is_flash,
    is_ready_made,
    kernel_for_masks,
    self_mask,
    with_bias,
)
from .configuration_roformer import RoFormerConfig
from .convert import convert_rope_layout
from .input_checks import check_masks, check_positions, check_source, check_tokens
from .kernels import UNPADDED, Dropout, Linear
from .kernels.dispatch import is_plain
from .kernels.dropout import dropout as fast_dropout
from .linear_attention import (
    LinearAttentionCache,
    RandomFeatureMap,
    RoFormerLinearSelfAttention,
)
from .position_encodings import (
    RelativePositions,
    TransformerXLBias,
    build_position_bias,
    relative_positions,
    sinusoidal_embeddings,
)
from .rotary import apply_rotary, compute_rope_parameters, rotary_embeddings

logger = logging.get_logger(__name__)


def _norm(config: RoFormerConfig, width: int) -> nn.Module:
    if config.norm_type == "rms_norm":
        return nn.RMSNorm(width, eps=config.layer_norm_eps, elementwise_affine=False)
    return nn.LayerNorm(width, eps=config.layer_norm_eps, bias=config.use_bias)


class RoFormerEmbeddings(nn.Module):
    """Word and token-type embeddings, normalised; positions enter here for two encodings alone."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        width, pad = config.embedding_dim, config.pad_token_id
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
            words = words * width**0.5 + sinusoidal_embeddings(positions, width).to(words.dtype)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(1, dtype=torch.long, device=words.device)
            words = words + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(words))


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

    Args:
        module: Attention layer, unused.
        query: [B, H, L, D].
        key: [B, H, S, D].
        value: [B, H, S, D].
        attention_mask: Added to the scores, broadcastable to [B, H, L, S], or None.
        scaling: Factor on the scores, 1 / sqrt(D).
        dropout: Probability of dropping an attention weight.
        **kwargs: Options of other kernels, unused.

    Returns:
        [B, L, H, D], and the probabilities [B, H, L, S].
    """
    scores = torch.matmul(query * scaling, key.transpose(-1, -2))
    if attention_mask is not None:
        scores = scores + attention_mask
        if scores.dtype == torch.float16:  # a row of -inf only would be NaN
            scores = scores.clamp(min=torch.finfo(scores.dtype).min)
    probabilities = F.softmax(scores, dim=-1)
    weights = fast_dropout(probabilities, dropout, training=True)
    return torch.matmul(weights, value).transpose(1, 2), probabilities


class RoFormerSelfAttention(nn.Module):
    """Multi-head attention whose scores know positions m and n by m - n only (equation 16).

    `position_embeddings` are cos and sin for RoPE, `RelativePositions` for Transformer-XL, and None
    for other encodings.

    As cross-attention, keys and values come from an encoder and nothing is rotated: its positions
    and the decoder's have no common origin.
    """

    def __init__(self, config: RoFormerConfig, layer_idx: int, crosses: bool = False) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.crosses = crosses
        self.heads = (config.num_attention_heads, config.attention_head_size)
        self.has_rotary = config.position_encoding == "rope" and not crosses
        self.interleave = config.rope_interleave
        self.scaling = config.attention_head_size**-0.5
        self.is_causal = config.is_decoder and not crosses
        is_relative = config.position_encoding == "transformer_xl" and not crosses
        self.relative = TransformerXLBias(config) if is_relative else None
        self.dropout = Dropout(config.attention_probs_dropout_prob)
        self.query = Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.key = Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.value = Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        position_embeddings: Any,
        source: Tensor | None,
        past_key_values: Cache | None,
        implementation: str,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, L, E] to [B, L, E] and, from the eager kernel, probabilities [B, H, L, S]."""
        heads = (*hidden_states.shape[:-1], *self.heads)
        q = self.query(hidden_states).view(heads)  # [B, L, H, D]
        if self.relative is not None:
            q, scores = self.relative(q, position_embeddings)
            attention_mask = with_bias(attention_mask, scores * self.scaling)
        elif self.has_rotary:
            q = self._rotate(q, position_embeddings)
        k, v = self._keys_and_values(
            hidden_states if source is None else source, position_embeddings, past_key_values
        )
        # transformers looks for this very call to know that kernels can be changed at run time
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
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

    def _rotate(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = position_embeddings
        return apply_rotary(x, cos, sin, self.interleave)

    def _keys_and_values(
        self, source: Tensor, position_embeddings: Any, past_key_values: Cache | None
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
        k, v = (layer(source).view(heads) for layer in (self.key, self.value))
        if self.has_rotary:
            k = self._rotate(k, position_embeddings)
            if self.config.rotary_value:
                v = self._rotate(v, position_embeddings)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return (k, v) if cache is None else cache.update(k, v, self.layer_idx)


class RoFormerResidual(nn.Module):
    """Projection, dropout, sum with the input, normalisation: how both halves of a layer end."""

    def __init__(self, config: RoFormerConfig, width: int) -> None:
        super().__init__()
        self.dense = Linear(width, config.hidden_size, bias=config.use_bias)
        self.LayerNorm = _norm(config, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[B, L, width] and [B, L, E] to [B, L, E]."""
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class RoFormerAttention(nn.Module):
    """Self-attention, or cross-attention, and its residual."""

    def __init__(self, config: RoFormerConfig, layer_idx: int, crosses: bool = False) -> None:
        super().__init__()
        self.self: RoFormerSelfAttention | RoFormerLinearSelfAttention
        if config.linear_attention is None:
            self.self = RoFormerSelfAttention(config, layer_idx, crosses)
        else:
            self.self = RoFormerLinearSelfAttention(config, layer_idx)
        self.output = RoFormerResidual(config, config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        position_embeddings: Any,
        source: Tensor | None,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, L, E] to [B, L, E], both of the text that attends; it reads `source`, or itself."""
        told = attention_mask, position_embeddings, source, past_key_values
        context, _ = self.self(hidden_states, *told, **kwargs)
        return self.output(context, hidden_states)


class RoFormerIntermediate(nn.Module):
    """The widening half of the feed-forward block."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.intermediate_act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, L, E] to [B, L, intermediate_size]."""
        return self.intermediate_act_fn(self.dense(hidden_states))


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
        position_embeddings: Any,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, L, E] to [B, L, E]."""
        attended = self.attention(
            hidden_states, attention_mask, position_embeddings, None, past_key_values, **kwargs
        )
        if encoder_hidden_states is not None:
            attended = self.crossattention(
                attended,
                encoder_attention_mask,
                position_embeddings,
                encoder_hidden_states,
                past_key_values,
                **kwargs,
            )
        return self.output(self.intermediate(attended), attended)


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
        position_embeddings: Any,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, L, E] to [B, L, E].

        Args:
            hidden_states: [B, L, E].
            attention_mask: As the kernel wants it.
            position_embeddings: As in `RoFormerSelfAttention`.
            encoder_hidden_states: [B, S, E], for cross-attention.
            encoder_attention_mask: As the kernel wants it.
            **kwargs: Cache, kernel and what else it is told.
        """
        # by position: a checkpointed layer passes no gradient on to what comes by name
        shared = attention_mask, position_embeddings, encoder_hidden_states, encoder_attention_mask
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
        width = config.embedding_dim
        self.dense = Linear(config.hidden_size, width, bias=config.use_bias)
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
        self.decoder = Linear(config.embedding_dim, config.vocab_size, bias=config.use_bias)
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
    loss_of: str | None = None
    """transformers' name of the loss; None leaves it to the class's name, as it does by itself."""
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
        config = _as_ours(config)
        config.check()  # fields may have been edited since it was made
        super().__init__(config, *args, **kwargs)
        if self.loss_of is not None:
            self.loss_type = self.loss_of

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RoFormerLMPredictionHead) and hasattr(module, "bias"):
            nn.init.zeros_(module.bias)
        if isinstance(module, RandomFeatureMap | TransformerXLBias):
            module.reset_parameters()

    @torch.no_grad()
    def set_rope_interleave(self, interleave: bool) -> None:
        """Convert the weights to the other pairing of coordinates; every output stays as it was.

        The rows of queries and keys (and of values, and the columns that read them, under
        `rotary_value`) are permuted, which loses nothing: converted back they are the same bits. Of
        another model made from the same configuration the weights stay, and it is saved as it is.

        Args:
            interleave: True for adjacent pairs, the paper's; False for coordinates i and i + D/2,
                so that kernels written for Llama run these weights.

        Raises:
            ValueError: An EncoderDecoderModel has given the model a configuration of stock's class,
                or it has adapters, or nothing is rotated, or only features of FAVOR+ are.
        """
        attention_blocks = [m for m in self.modules() if isinstance(m, RoFormerAttention)]
        convert_rope_layout(self.config, attention_blocks, interleave)
        # in place: a composed model saves the configurations of its parts
        self._describe(self.config, interleave)

    def _describe(self, config: RoFormerConfig, interleave: bool) -> None:
        config.rope_interleave = interleave
        for holder in self.modules():
            for name in ("config", "rope_config"):
                if hasattr(holder, name):
                    setattr(holder, name, config)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Write model and configuration; see transformers' `PreTrainedModel.save_pretrained`."""
        pairings = {m.interleave for m in self.modules() if getattr(m, "has_rotary", False)}
        if pairings == {not getattr(self.config, "rope_interleave", None)}:
            # a part alone was converted, or another model that was made from this configuration
            self._describe(copy.copy(self.config), *pairings)
        super().save_pretrained(*args, **kwargs)


def _as_ours(config: PreTrainedConfig) -> RoFormerConfig:
    """A configuration of this class; from transformers' own RoFormer the same fields."""
    if isinstance(config, RoFormerConfig):
        return config
    if getattr(config, "model_type", None) != RoFormerConfig.model_type:
        found = f"{type(config).__module__}.{type(config).__name__}"
        raise ValueError(f"config must be a RoFormerConfig, got {found}; make one of its fields")
    own = RoFormerConfig.from_dict(config.to_dict())
    own._attn_implementation = config._attn_implementation
    return own


@dataclass(frozen=True)
class _Plan:
    """How the layers of a call attend.

    Attributes:
        kernel: Of attention.
        mask: What it is told by a mask.
        layout: Other rows in which tokens stand meanwhile, or None.
        options: What it is told besides.
    """

    kernel: str
    mask: Any
    layout: documents.Apart | documents.Unpadded | None = None
    options: dict[str, Any] = field(default_factory=dict)


class RoFormerModel(RoFormerPreTrainedModel):
    """The encoder (or with `config.is_decoder` the decoder) without a head."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        config = self.config  # ours, where stock's was given
        self.embeddings = RoFormerEmbeddings(config)
        width, wider = config.embedding_dim, config.hidden_size
        project = None if width == wider else Linear(width, wider, bias=config.use_bias)
        self.embeddings_project = project
        self.encoder = RoFormerEncoder(config)
        self.score_bias = build_position_bias(config)
        # layers were made by these: an edit would change what is saved, and not what is computed
        self.built = {name: getattr(config, name) for name in ("position_encoding", "is_decoder")}
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
                ready-made [B or 1, 1 or H, L or 1, S], bool (True is seen) or floats added to
                scores, which is taken as it is: causality and documents are its business.
            token_type_ids: [B, L] or [1, L] segments; None means all 0.
            position_ids: [L] or [B, L] integers, any start, order and gaps; None counts from 0, or
                from the end of the cache. A row that counts up by one, and from 0 again and again,
                is packed; its first document may begin anywhere. Encodings that add to scores
                count tokens behind a cache, whatever is given.
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
                vocabulary are noticed on CPU only, because to look is to wait for another device.
        """
        config = self.rope_config
        size = getattr(self.get_input_embeddings(), "num_embeddings", config.vocab_size)
        check_tokens(config, size, input_ids, inputs_embeds, token_type_ids, position_ids)
        rows = input_ids if inputs_embeds is None else inputs_embeds
        assert rows is not None, "one of the two has been given"
        cache = self._cache(past_key_values, use_cache, encoder_hidden_states)
        start = 0 if cache is None else cache.get_seq_length()
        check_masks(config, rows, cache, attention_mask, cu_seq_lens_q)
        check_source(config, rows, encoder_hidden_states, encoder_attention_mask)
        follows = past_key_values is not None
        batch = documents.arrange(rows, start, attention_mask, position_ids, cu_seq_lens_q, follows)
        check_positions(config, batch.positions)
        if batch.documents is not None and cache is not None:
            cache = _cache_of_packed_rows(cache, past_key_values, cu_seq_lens_q)
        words = self.embeddings(input_ids, token_type_ids, inputs_embeds, batch.positions)
        if self.embeddings_project is not None:
            words = self.embeddings_project(words)
        # only Transformer-XL's table must reach as far as the farthest tokens
        gaps = position_ids is not None or batch.documents is not None
        gaps = gaps and config.position_encoding == "transformer_xl"
        where, bias = self._where(batch, start, gaps, words.dtype)
        source, alone = encoder_hidden_states, cache is None and encoder_hidden_states is None
        borders = cu_seq_lens_q if _is_one_row(words, attention_mask) else None
        kernel = self._kernel(kwargs, attention_mask, encoder_attention_mask)
        plan = self._without_mask(kernel, batch, borders, max_length_q, alone, kwargs)
        if plan is None:
            kernel = kernel_for_masks(kernel, batch.documents)
            mask = self._mask(kernel, words, attention_mask, batch.documents, cache, bias)
            plan = _Plan(kernel, mask)
        layout = plan.layout
        if layout is not None:
            if where is not None and not isinstance(where, RelativePositions):
                cos, sin = (layout.pack(x.expand(*words.shape[:2], -1)) for x in where)
                where = cos, sin
            words = layout.pack(words)
        hidden_states = self.encoder(
            words,
            plan.mask,
            where,
            source,
            cross_mask(self.config, plan.kernel, words, source, encoder_attention_mask),
            past_key_values=cache,
            implementation=plan.kernel,
            **(kwargs | plan.options),
        )
        if isinstance(cache, LinearAttentionCache):
            cache.num_tokens += rows.shape[1]
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states if layout is None else layout.unpack(hidden_states),
            past_key_values=cache,
        )

    def _cache(
        self, given: Cache | None, use_cache: bool | None, encoder_hidden_states: Tensor | None
    ) -> Cache | None:
        if given is not None and not (isinstance(given, Cache) and self.is_causal):
            found = type(given).__name__ if self.is_causal else "a cache in an encoder"
            raise ValueError(
                f"past_key_values must be a transformers Cache of a decoder, got {found}; set "
                "is_decoder=True, or leave it out"
            )
        if given is not None and self.rope_config.has_position_bias and given.is_compileable:
            raise ValueError(
                "past_key_values must be a cache that grows where positions are added to scores, "
                f"got a {type(given).__name__}; leave cache_implementation out"
            )
        if given is not None and self.rope_config.has_dynamic_rope:
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

    def _without_mask(
        self,
        kernel: str,
        batch: documents.Batch,
        borders: Tensor | None,
        longest: int | None,
        alone: bool,
        options: dict[str, Any],
    ) -> _Plan | None:
        """The plan of what needs no mask: linear attention, and kernels that know borders.

        Args:
            kernel: Of attention.
            batch: What the call holds.
            borders: Of documents, where they come as one row without padding.
            longest: Tokens of the longest of them, if known.
            alone: Whether neither a cache nor an encoder is attended to.
            options: Of the call.
        """
        if self.rope_config.linear_attention is not None:
            rows, real = self._before_linear(batch, options)
            return _Plan(kernel, real, rows)
        if not alone or not (kernel == UNPADDED or is_flash(kernel)):
            return None
        if borders is not None:
            told = documents.kernel_options(borders.to(batch.positions.device), longest)
            return _Plan(kernel, None, None, told)
        if batch.real is None or not self._may_drop_padding(options):
            return None
        layout = documents.unpad(batch.real, batch.documents)
        if layout is None:
            return None
        told = documents.kernel_options(layout.borders, layout.longest)
        return _Plan(kernel, None, layout, told)

    def _before_linear(
        self, batch: documents.Batch, options: dict[str, Any]
    ) -> tuple[documents.Apart | None, Tensor | None]:
        """Documents in rows of their own, and which tokens are real; in training new features."""
        if batch.real is None:
            raise ValueError(
                "attention_mask must be [B, S] with linear_attention, got four dimensions, as "
                "static caches make them; leave cache_implementation out"
            )
        if self.training:
            # counted here, because layers with gradient checkpointing run twice
            for module in self.modules():
                if isinstance(module, RandomFeatureMap):
                    module.count_call()
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
        self, batch: documents.Batch, start: int | Tensor, gaps: bool, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, Tensor] | RelativePositions | None, Tensor | None]:
        """What layers must know of positions, and what all of them add to their scores."""
        for name, built in self.built.items():
            edited = getattr(self.rope_config, name)
            if edited != built:
                raise ValueError(
                    f"config.{name} must stay {built} in a built model, got {edited!r}; give it to "
                    "from_pretrained"
                )
        if self.rope_config.position_encoding == "rope":
            return self._rotation(batch, dtype), None
        if not self.rope_config.has_position_bias:
            return None, None
        found = relative_positions(batch.positions, int(start), gaps)
        return found, None if self.score_bias is None else self.score_bias(found)

    def _rotation(self, batch: documents.Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of this call, each [1 or B, L, D'/2], for all layers.

        Computed from the configuration on every call: a buffer would be cast by `.bfloat16()`, left
        uninitialised by a load on the meta device, and wrong after an edit of the configuration.
        """
        if not torch.compiler.is_compiling():
            self.rope_config.check_rope()  # its settings are a dict, which anybody may have edited
        lengths = batch.lengths() if self.rope_config.has_dynamic_rope else None
        theta, scaling = compute_rope_parameters(self.rope_config, lengths, batch.positions.device)
        if lengths is None and batch.documents is not None and is_plain(batch.positions):
            # documents in a row repeat their positions, and sines in float64 are slow on a CPU
            different, places = batch.positions.unique(return_inverse=True)
            cos, sin = rotary_embeddings(different, theta, scaling, dtype)
            return cos[places], sin[places]
        return rotary_embeddings(batch.positions, theta, scaling, dtype)

    def _kernel(self, options: dict[str, Any], *masks: Any) -> str:
        """Name of the attention kernel; only the eager one returns probabilities."""
        chosen = kernels.select_attention(self.config._attn_implementation or "eager")
        wanted = options.get("output_attentions", self.config.output_attentions)
        if wanted and self.rope_config.linear_attention is not None:
            raise ValueError(
                "output_attentions must be False with linear_attention, got True: there are no "
                "probabilities; leave it out"
            )
        if wanted and chosen != "eager":
            logger.warning_once(
                f"attn_implementation={chosen!r} returns no attention probabilities; calls with "
                "output_attentions=True are computed by the eager kernel"
            )
            return "eager"
        if self.rope_config.has_position_bias and chosen not in ("eager", "sdpa"):
            logger.warning_once(
                f"attn_implementation={chosen!r} adds nothing to scores, and position_encoding "
                f"{self.rope_config.position_encoding} is added there; calls are computed by sdpa"
            )
            return "sdpa"
        if chosen == "flex_attention" and any(is_ready_made(mask) for mask in masks):
            # transformers gives it the first head's for all, and on a CPU the process dies
            logger.warning_once(
                f"attn_implementation={chosen!r} takes a BlockMask or [B, S]; calls with other "
                "masks of four dimensions are computed by sdpa"
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
        cache: Cache | None,
        bias: Tensor | None,
    ) -> Any:
        """Padding, causality and documents for the kernel, and what positions add to scores."""
        form = "eager" if self.rope_config.has_position_bias else kernel  # numbers, to be added to
        options = attention_mask, numbers, self.is_causal, cache
        mask = self_mask(self.config, form, words, *options)
        return mask if bias is None else with_bias(mask, bias.to(words.device, words.dtype))


def _is_one_row(words: Tensor, attention_mask: Any) -> bool:
    """Whether documents come as kernels for variable lengths want them: nothing is to be done."""
    if attention_mask is not None or words.shape[0] != 1:
        return False
    # without a device kernel the borders are read on the host, which no compiler can follow
    return words.is_cuda or not torch.compiler.is_compiling()


def _cache_of_packed_rows(
    cache: Cache, given: Cache | None, borders: Tensor | None
) -> Cache | None:
    """Nothing can follow a row of several documents, so keys and values are not kept.

    While compiling any row may be one by its positions, which are not known: then they are.
    """
    if given is not None:
        raise ValueError(
            "position_ids must count through one document beside past_key_values, got several "
            "that start from 0; leave the cache out"
        )
    known = borders is not None or not torch.compiler.is_compiling()
    return None if known or isinstance(cache, LinearAttentionCache) else cache


def _linear_cache(given: Cache | None, wanted: bool) -> Cache | None:
    """The cache of linear attention: sums, which no other kind can keep."""
    if given is not None and not isinstance(given, LinearAttentionCache):
        raise ValueError(
            "past_key_values must be a LinearAttentionCache with linear_attention, got a "
            f"{type(given).__name__}; leave it out"
        )
    return LinearAttentionCache() if given is None and wanted else given
