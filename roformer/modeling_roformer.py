"""RoFormer: a BERT encoder whose self-attention rotates queries and keys by their position.

Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864). Module and parameter names are those of
transformers' own RoFormer, so that checkpoints pass both ways; what differs is that positions come
from `position_ids`, angles stay float32, and the rotation is computed once a forward, not a layer.

Legend: B batch, L tokens, E width, H heads, D head width, V vocabulary.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import attend
from .configuration_roformer import RoFormerConfig
from .rotary import inverse_frequencies, rotate, rotation_table

Rotation: TypeAlias = tuple[Tensor, Tensor]  # cos, sin: [L, D/2] or [B, L, D/2], float32


def _embedding_width(config: RoFormerConfig) -> int:
    return config.embedding_size or config.hidden_size


class RoFormerEmbeddings(nn.Module):
    """Word and token-type embeddings, normalised; no positions: they enter in the attention."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        width = _embedding_width(config)
        self.word_embeddings = nn.Embedding(
            config.vocab_size, width, padding_idx=config.pad_token_id
        )
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, input_ids: Tensor | None, token_type_ids: Tensor | None, inputs_embeds: Tensor | None
    ) -> Tensor:
        """[B, L] ids, or [B, L, embedding_size] vectors, to [B, L, embedding_size]."""
        words = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if token_type_ids is None:
            types = self.token_type_embeddings.weight[
                0
            ]  # everything is segment 0: no gather needed
        else:
            types = self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(words + types))


class RoFormerSelfAttention(nn.Module):
    """Multi-head attention whose scores know positions m and n by m - n only (equation 16)."""

    def __init__(self, config: RoFormerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_width = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_width**-0.5
        self.is_causal = False
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, rotation: Rotation, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[B, L, E] to [B, L, E] and, from the eager kernel, probabilities [B, H, L, L]."""
        heads = (*hidden_states.shape[:-1], -1, self.head_width)
        q = rotate(self.query(hidden_states).view(heads), *rotation)  # [B, L, H, D]
        k = rotate(self.key(hidden_states).view(heads), *rotation)
        v = self.value(hidden_states).view(heads)
        if self.config.rotary_value:
            v = rotate(v, *rotation)
        context, probabilities = attend(
            self,
            self.config._attn_implementation,
            *(x.transpose(1, 2) for x in (q, k, v)),  # [B, H, L, D]
            attention_mask,
            scaling=self.scaling,
            dropout=self.config.attention_probs_dropout_prob if self.training else 0.0,
            **kwargs,
        )
        return context.flatten(-2), probabilities


class RoFormerResidual(nn.Module):
    """Projection, dropout, sum with the input, LayerNorm: how both halves of a layer end."""

    def __init__(self, config: RoFormerConfig, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[B, L, width] and [B, L, E] to [B, L, E]."""
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class RoFormerAttention(nn.Module):
    """Self-attention and its residual."""

    def __init__(self, config: RoFormerConfig, layer_idx: int) -> None:
        super().__init__()
        self.self = RoFormerSelfAttention(config, layer_idx)
        self.output = RoFormerResidual(config, config.hidden_size)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[B, L, E] to [B, L, E]."""
        context, _ = self.self(hidden_states, *args, **kwargs)
        return self.output(context, hidden_states)


class RoFormerIntermediate(nn.Module):
    """The widening half of the feed-forward block."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, L, E] to [B, L, intermediate_size]."""
        return self.intermediate_act_fn(self.dense(hidden_states))


class RoFormerLayer(GradientCheckpointingLayer):
    """Attention and feed-forward, each normalised after its residual sum, as in BERT."""

    def __init__(self, config: RoFormerConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = RoFormerAttention(config, layer_idx)
        self.intermediate = RoFormerIntermediate(config)
        self.output = RoFormerResidual(config, config.intermediate_size)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, rotation: Rotation, **kwargs: Any
    ) -> Tensor:
        """[B, L, E] to [B, L, E]."""
        attended = self.attention(hidden_states, attention_mask, rotation, **kwargs)
        return self.output(self.intermediate(attended), attended)


class RoFormerEncoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            RoFormerLayer(config, i) for i in range(config.num_hidden_layers)
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, rotation: Rotation, **kwargs: Any
    ) -> Tensor:
        """[B, L, E] to [B, L, E]."""
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask, rotation, **kwargs)
        return hidden_states


class RoFormerPredictionHeadTransform(nn.Module):
    """Dense, activation, LayerNorm: from encoder width to embedding width."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, _embedding_width(config))
        self.transform_act_fn = ACT2FN[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(_embedding_width(config), eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] to [..., embedding_size]."""
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


class RoFormerLMPredictionHead(nn.Module):
    """Scores over the vocabulary; the decoder shares the word embeddings when they are tied."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.transform = RoFormerPredictionHeadTransform(config)
        self.decoder = nn.Linear(_embedding_width(config), config.vocab_size)
        # stock saves the bias under this second name; it is tied to the decoder's own
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] to [..., V]."""
        return self.decoder(self.transform(hidden_states))


class RoFormerOnlyMLMHead(nn.Module):
    """The masked-LM head, under the name the checkpoints give it."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.predictions = RoFormerLMPredictionHead(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., E] to [..., V]."""
        return self.predictions(hidden_states)


class RoFormerPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by all RoFormer models."""

    config: RoFormerConfig
    config_class = RoFormerConfig
    base_model_prefix = "roformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["RoFormerEmbeddings", "RoFormerLayer"]  # noqa: RUF012 transformers' type
    _can_record_outputs = {  # noqa: RUF012 likewise
        "hidden_states": RoFormerLayer,
        "attentions": RoFormerSelfAttention,
    }
    # stock saves its table of sines; ours are computed, so the key is read and dropped
    _keys_to_ignore_on_load_unexpected = [r"encoder\.embed_positions\.weight"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RoFormerLMPredictionHead):
            nn.init.zeros_(module.bias)


class RoFormerModel(RoFormerPreTrainedModel):
    """The encoder without a head.

    Raises:
        ValueError: The configuration asks for a decoder, which this version does not have.
    """

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        if config.is_decoder or config.add_cross_attention:
            raise ValueError(
                "is_decoder and add_cross_attention must be False, got True; use an encoder"
            )
        self.embeddings = RoFormerEmbeddings(config)
        if config.embedding_size != config.hidden_size:
            self.embeddings_project = nn.Linear(_embedding_width(config), config.hidden_size)
        self.encoder = RoFormerEncoder(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embeddings."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word embeddings."""
        self.embeddings.word_embeddings = value

    def _rotation(self, position_ids: Tensor | None, embedded: Tensor) -> Rotation:
        if position_ids is None:
            position_ids = torch.arange(embedded.shape[1], device=embedded.device)
        width = self.config.hidden_size // self.config.num_attention_heads
        # recomputed from the configuration on every call: a buffer would be cast by `.bfloat16()`
        # and left uninitialised by a meta-device load
        theta = inverse_frequencies(width).to(embedded.device)
        return rotation_table(position_ids, theta)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Encode tokens.

        Args:
            input_ids: [B, L] token ids.
            attention_mask: [B, L], 1 for a token and 0 for padding; or [B, 1, L, L] ready-made.
            token_type_ids: [B, L] segments; None means all 0.
            position_ids: [L] or [B, L] positions, any order and start; None counts from 0.
            inputs_embeds: [B, L, embedding_size] in place of `input_ids`.
            **kwargs: transformers' `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `last_hidden_state` [B, L, E] and what was asked for.

        Raises:
            ValueError: Both or neither of `input_ids` and `inputs_embeds` are given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "exactly one of input_ids and inputs_embeds must be given, got both or neither"
            )
        embedded = self.embeddings(input_ids, token_type_ids, inputs_embeds)
        if self.config.embedding_size != self.config.hidden_size:
            embedded = self.embeddings_project(embedded)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=embedded, attention_mask=attention_mask
        )
        rotation = self._rotation(position_ids, embedded)
        return BaseModelOutput(last_hidden_state=self.encoder(embedded, mask, rotation, **kwargs))


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
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The decoder."""
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the decoder."""
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

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
    ) -> MaskedLMOutput:
        """Score the vocabulary at every token.

        Args:
            input_ids: As `RoFormerModel.forward`, like all but `labels`.
            attention_mask: [B, L] or [B, 1, L, L].
            token_type_ids: [B, L].
            position_ids: [L] or [B, L].
            inputs_embeds: [B, L, embedding_size].
            labels: [B, L] original ids where a token was masked, -100 elsewhere.
            **kwargs: As `RoFormerModel.forward`.

        Returns:
            `logits` [B, L, V]; `loss`, the mean over labelled tokens, when `labels` are given.
        """
        outputs = self.roformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
        )
        logits = self.cls(outputs.last_hidden_state)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


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
        logits = self.classifier(_first_token(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _first_token(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The first unmasked token of each row, [B, E]; row 0 when no [B, L] mask says otherwise."""
    if attention_mask is None or attention_mask.ndim != 2:
        return hidden_states[:, 0]
    first = attention_mask.to(torch.int32).argmax(dim=-1)  # argmax gives the first of equal values
    return hidden_states[torch.arange(len(first), device=first.device), first]
