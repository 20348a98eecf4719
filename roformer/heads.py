"""Models with a head: masked and causal language models, classification, question answering.

Class and parameter names are those of transformers' RoFormer, so that checkpoints load in both
directions. Losses are divided by `num_items_in_batch` where transformers' Trainer passes it, except
in question answering. Classification heads, too small for a kernel to gain, use torch's layers.

Legend: B batch, L tokens, E hidden size, V vocabulary.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from .configuration_roformer import RoFormerConfig
from .input_checks import check_generation, check_shape, one_document_per_row
from .losses import IGNORE_INDEX, compute_loss, is_sparse_loss_faster, may_unpad_for_loss
from .modeling_roformer import RoFormerModel, RoFormerOnlyMLMHead, RoFormerPreTrainedModel

logger = logging.get_logger(__name__)

BASE_MODEL_KWARGS: dict[str, Any] = {"return_dict": True, "use_cache": False, "unpad": True}
"""What heads pass to `RoFormerModel`: they read outputs by name, need no cache, and let it leave
padding out without a warning, but pass `unpad=False` if their loss reads outputs there."""


class RoFormerLanguageModel(RoFormerPreTrainedModel):
    """Base of both language models: an encoder or decoder, and a projection to the vocabulary."""

    _tied_weights_keys = {  # noqa: RUF012 transformers' type
        "cls.predictions.decoder.bias": "cls.predictions.bias",
        "cls.predictions.decoder.weight": "roformer.embeddings.word_embeddings.weight",
    }

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        self.roformer = RoFormerModel(self.config)
        self.cls = RoFormerOnlyMLMHead(self.config)
        if not self.config.use_bias:
            tied = self._tied_weights_keys.items()
            self._tied_weights_keys = {k: v for k, v in tied if not k.endswith("bias")}
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """Return the projection to the vocabulary."""
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the projection to the vocabulary."""
        head, bias = self.cls.predictions, new_embeddings.bias
        head.decoder = new_embeddings  # type: ignore[assignment]
        if bias is not None:  # if tied, the two names are one tensor, which is saved once
            tied = self.config.tie_word_embeddings
            head.bias = bias if tied else nn.Parameter(torch.zeros_like(bias))


def _warn_if_causal(config: RoFormerConfig) -> None:
    """Warn of a head that cannot work, or not well, with tokens that see earlier ones only."""
    if config.is_decoder:
        logger.warning(
            "config.is_decoder is True, so every token attends to earlier ones only, and the first "
            "one to itself alone; load the model with is_decoder=False to attend to both sides"
        )


class RoFormerForMaskedLM(RoFormerLanguageModel):
    """RoFormer with the masked-language-modelling head."""

    loss_name = "ForMaskedLM"

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        _warn_if_causal(self.config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Compute logits over the vocabulary.

        In training with `config.sparse_prediction` they are computed at labelled tokens only.
        Otherwise, on a CPU, when gradients are recorded and fewer than half of the tokens have
        labels, the head runs twice: on labelled tokens for the loss, which is faster to
        differentiate, and on all tokens for `logits`, on which the loss then does not depend.

        `labels` are [B, L], the original ids of labelled tokens and -100 elsewhere. All other
        arguments are those of `RoFormerModel.forward`.

        Returns:
            `logits` [B, L, V], or of n labelled tokens [n, V] in row-major order; `loss`, the mean
            over labelled tokens, when `labels` are given.
        """
        unpad = may_unpad_for_loss(self, labels, attention_mask)
        inputs = input_ids, attention_mask, token_type_ids, inputs_embeds
        cross_inputs = encoder_hidden_states, encoder_attention_mask
        options = BASE_MODEL_KWARGS | {"unpad": unpad} | kwargs
        outputs = self.roformer(*inputs, *cross_inputs, position_ids=position_ids, **options)
        hidden_states = outputs.last_hidden_state
        is_sparse = self.training and self.config.sparse_prediction
        if labels is not None and (is_sparse or is_sparse_loss_faster(labels, hidden_states)):
            is_labelled = labels != IGNORE_INDEX
            labels, loss_logits = labels[is_labelled], self.cls(hidden_states[is_labelled])
            # the loss has its own graph: unlabelled tokens cost no backward pass
            logits = loss_logits if is_sparse else self.cls(hidden_states)
        else:
            logits = loss_logits = self.cls(hidden_states)
        loss = compute_loss(self, loss_logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class RoFormerForCausalLM(RoFormerLanguageModel, GenerationMixin):
    """RoFormer with a language-modelling head that predicts the next token.

    It attends to earlier tokens only, whatever `config.is_decoder` says: its own copy of the
    configuration says True.
    """

    loss_name = "ForCausalLM"

    def __init__(self, config: RoFormerConfig) -> None:
        if not config.is_decoder:
            config = copy.deepcopy(config)
            config.is_decoder = True
        super().__init__(config)
        self._is_stateful = not self.config.has_cache  # `generate` then refuses an assistant model

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Let `generate` compute the whole text for each token where there is no cache."""
        if not self.config.has_cache or self.roformer.recomputes_layers:
            check_generation(model_kwargs)
            generation_config.use_cache = model_kwargs["use_cache"] = False
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """Compute logits of the next token at every token.

        `labels` are [B, L], the ids of `input_ids` (the shift is made here) or -100 for none. In
        packed rows give -100 to the first token of each document, and behind padding on the left to
        the first of each row: no token before it predicts it.
        `logits_to_keep` is the number of last tokens to score; `labels` are then theirs alone,
        [B, logits_to_keep]. 0 means all. Without `labels` it can also be indices of tokens, [n].
        With `labels` the default of `use_cache` is False. All other arguments are those of
        `RoFormerModel.forward`.

        Returns:
            `logits` [B, L, V]; `loss`, the mean over labelled tokens, when `labels` are given;
            `past_key_values`.
        """
        if labels is not None and use_cache is None:
            use_cache = past_key_values is not None
        unpad = may_unpad_for_loss(self, labels, attention_mask, shift=1)
        inputs = input_ids, attention_mask, token_type_ids, inputs_embeds
        cross_inputs = encoder_hidden_states, encoder_attention_mask
        options = {"unpad": unpad, "return_dict": True} | kwargs
        options |= {"past_key_values": past_key_values, "use_cache": use_cache}
        outputs = self.roformer(*inputs, *cross_inputs, position_ids=position_ids, **options)
        indices: Any = logits_to_keep
        if isinstance(logits_to_keep, int):
            indices = slice(-logits_to_keep, None)
        elif labels is not None or logits_to_keep.ndim != 1:  # labels are those of the next token
            raise ValueError("logits_to_keep must be a number, or without labels indices [n]")
        logits = self.cls(outputs.last_hidden_state[:, indices])
        return CausalLMOutputWithCrossAttentions(
            loss=compute_loss(self, logits, labels, vocab_size=self.config.vocab_size, **kwargs),
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )


class RoFormerClassificationHead(nn.Module):
    """Dense layer, `hidden_act` and projection to the labels, with dropout before both layers."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, pooled: Tensor) -> Tensor:
        """[B, E] to [B, labels]."""
        hidden_states = self.activation(self.dense(self.dropout(pooled)))
        return self.out_proj(self.dropout(hidden_states))


class RoFormerForSequenceClassification(RoFormerPreTrainedModel):
    """RoFormer with a head on the first token, for classification or regression (GLUE)."""

    loss_name = "ForSequenceClassification"

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        _warn_if_causal(self.config)
        self.num_labels = self.config.num_labels
        self.roformer = RoFormerModel(self.config)
        self.classifier = RoFormerClassificationHead(self.config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Score the labels of each sequence from its first token that is not padding.

        Under a mask of four dimensions it is the first column.
        `labels` are [B] class ids, [B] values of a regression, or [B, labels] for several labels.
        All other arguments are those of `RoFormerModel.forward`.

        Returns:
            `logits` [B, labels]; `loss` when `labels` are given.
        """
        inputs = input_ids, attention_mask, token_type_ids, inputs_embeds
        rows = input_ids if inputs_embeds is None else inputs_embeds
        kwargs |= one_document_per_row(kwargs.get("cu_seq_lens_q"), position_ids, rows)
        outputs = self.roformer(*inputs, position_ids=position_ids, **(BASE_MODEL_KWARGS | kwargs))
        logits = self.classifier(_pool_token(outputs.last_hidden_state, attention_mask, "first"))
        loss, num_items = None, kwargs.get("num_items_in_batch")
        if labels is not None:
            loss = self.loss_function(
                labels=labels,
                pooled_logits=logits,
                config=self.config,
                num_items_in_batch=num_items,
            )
            if num_items is not None and self.config.problem_type != "single_label_classification":
                loss = loss * labels.numel() / num_items  # it is the mean of this micro-batch
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _pool_token(hidden_states: Tensor, attention_mask: Any, which: str) -> Tensor:
    """Return the first or last token of each row that is not padding, [B, E]."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        return hidden_states[:, 0 if which == "first" else -1]
    mask = attention_mask.to(torch.int32)
    # argmax returns the first of equal values
    index = mask.argmax(-1) if which == "first" else mask.cumsum(-1).argmax(-1)
    return hidden_states[torch.arange(index.shape[0], device=index.device), index]


class RoFormerForMultipleChoice(RoFormerPreTrainedModel):
    """RoFormer that scores several choices, each by the token that `config.summary_type` names."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        if self.config.summary_type not in ("first", "last"):
            found = self.config.summary_type
            raise ValueError(f"summary_type must be one of first, last, got {found!r}")
        self.roformer = RoFormerModel(self.config)
        self.classifier = nn.Linear(self.config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """Score the choices.

        `labels` are [B], the index of the right choice. All other arguments are those of
        `RoFormerModel.forward` with a dimension for the choices, [B, choices, L], except that
        `position_ids` may be [L] for all.

        Returns:
            `logits` [B, choices]; `loss` when `labels` are given.
        """
        if input_ids is not None:
            check_shape("input_ids", input_ids, (None, None, None))
        if inputs_embeds is not None:
            check_shape("inputs_embeds", inputs_embeds, (None, None, None, None))
        *inputs, positions = (
            x.flatten(0, 1) if isinstance(x, Tensor) and x.ndim > 2 else x
            for x in (input_ids, attention_mask, token_type_ids, inputs_embeds, position_ids)
        )
        rows = inputs[0] if inputs_embeds is None else inputs[-1]
        kwargs |= one_document_per_row(kwargs.get("cu_seq_lens_q"), positions, rows)
        outputs = self.roformer(*inputs, position_ids=positions, **(BASE_MODEL_KWARGS | kwargs))
        pooled = _pool_token(outputs.last_hidden_state, inputs[1], self.config.summary_type)
        choices = (inputs_embeds if input_ids is None else input_ids).shape[1]  # type: ignore
        logits = self.classifier(pooled).view(-1, choices)
        num_items = kwargs.get("num_items_in_batch")
        return MultipleChoiceModelOutput(
            loss=None if labels is None else fixed_cross_entropy(logits, labels, num_items),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class RoFormerForTokenClassification(RoFormerPreTrainedModel):
    """RoFormer with a label for every token, for tagging and named-entity recognition."""

    loss_name = "ForTokenClassification"

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        self.num_labels = self.config.num_labels
        self.roformer = RoFormerModel(self.config)
        self.dropout = nn.Dropout(self.config.hidden_dropout_prob)
        self.classifier = nn.Linear(self.config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Score the labels of each token.

        `labels` are [B, L] class ids, -100 for tokens without one. All other arguments are those of
        `RoFormerModel.forward`.

        Returns:
            `logits` [B, L, labels]; `loss`, the mean over labelled tokens, when `labels` are given.
        """
        unpad = may_unpad_for_loss(self, labels, attention_mask)
        inputs = input_ids, attention_mask, token_type_ids, inputs_embeds
        outputs = self.roformer(
            *inputs, position_ids=position_ids, **(BASE_MODEL_KWARGS | {"unpad": unpad} | kwargs)
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        return TokenClassifierOutput(
            loss=compute_loss(self, logits, labels, config=self.config, **kwargs),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class RoFormerForQuestionAnswering(RoFormerPreTrainedModel):
    """RoFormer that predicts start and end of an answer in the text (SQuAD)."""

    loss_name = "ForQuestionAnswering"

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        self.num_labels = 2  # start and end
        self.roformer = RoFormerModel(self.config)
        self.qa_outputs = nn.Linear(self.config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Score every token as the start and as the end of the answer.

        `start_positions` and `end_positions` are [B], the indices of the first and the last token
        of the answer; as in transformers, both are ignored beyond the text, and negative ones
        count as 0. All other arguments are those of `RoFormerModel.forward`.

        Returns:
            `start_logits` and `end_logits` [B, L]; `loss`, the mean of both, when both are given.
        """
        # the softmax over a row includes its padding, as in transformers
        inputs = input_ids, attention_mask, token_type_ids, inputs_embeds
        outputs = self.roformer(
            *inputs, position_ids=position_ids, **(BASE_MODEL_KWARGS | {"unpad": False} | kwargs)
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
