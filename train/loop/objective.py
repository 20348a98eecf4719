"""Model and loss of masked and causal language modelling, computed at predicted positions only.

An encoder predicts masked tokens, a decoder (`is_decoder` in its configuration) every next token.
The vocabulary layer is most of a small model's arithmetic: without the 85 % of positions that are
not predicted, the head is 6 times faster, and a whole step 3 times (4 x 256 tokens, V = 30,522).
"""

import dataclasses
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from roformer.kernels.attention import AUTO, UNPADDED, has_varlen_kernel
from roformer.modeling_roformer import RoFormerPreTrainedModel
from train.data.masking import IGNORE_INDEX
from train.loop.launch import compute_dtype
from train.loop.model_init import build_config, build_model
from train.settings import InputError, ModelSettings


class LanguageModel(nn.Module):
    """A model with a language-model head, as one module from batch to loss.

    Args:
        model: A model whose head is at `cls`, as in transformers' BERT and RoFormer.

    Raises:
        InputError: The model has no such head, or does not know its attention implementation.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        kind = repr(model.config.model_type)
        if not hasattr(model, "cls"):
            raise InputError(
                "model.type must keep its language-model head under `cls`, as roformer and bert "
                f"do, got {kind}; use one of those"
            )
        self.model = model
        self.cross_entropy = CrossEntropy()
        if self.packed and not isinstance(model, RoFormerPreTrainedModel):
            raise InputError(
                "model.attention must be an implementation that model.type knows, "
                f"got {UNPADDED!r} for {kind}; use sdpa or train a roformer"
            )
        head = getattr(model.cls, "predictions", None)
        if head is not None and getattr(head, "bias", None) is not None:
            # without tied weights this bias is unused, also in transformers' models
            head.bias.requires_grad_(head.bias is head.decoder.bias)
        # modules that FSDP shards: layers, but not embeddings, whose weights the output layer uses
        names = model._no_split_modules or ()
        self._no_split_modules = [name for name in names if not name.endswith("Embeddings")]

    @property
    def packed(self) -> bool:
        """Whether batches have to be packed rows: with the implementation `unpadded`.

        Position encodings that add a bias to the attention scores still need padded rows.
        """
        biased = getattr(self.model.config, "has_position_bias", False)
        return self.model.config._attn_implementation == UNPADDED and not biased

    @property
    def causal(self) -> bool:
        """Whether the model predicts every next token instead of masked ones."""
        return bool(getattr(self.model.config, "is_decoder", False))

    def prefer_packed_rows(self, accelerator: Accelerator) -> None:
        """Leave padding out on a GPU too, where "auto" by itself would have to wait for lengths.

        Only if the GPU has a kernel for documents of different lengths, and the model no bias on
        the scores and no linear attention.
        """
        config = self.model.config
        if not isinstance(self.model, RoFormerPreTrainedModel):
            return
        needs_rows = config.has_position_bias or config.linear_attention is not None
        dtype, head_dim = compute_dtype(accelerator), config.attention_head_size
        has_kernel = has_varlen_kernel(accelerator.device, dtype, head_dim)
        if config._attn_implementation == AUTO and has_kernel and not needs_rows:
            self.model.set_attn_implementation(UNPADDED)

    def tie_weights(self) -> None:
        """Tie the output layer to the embeddings; called by Accelerate after sharding."""
        self.model.tie_weights()

    def forward(
        self, input_ids: Tensor, label_positions: Tensor, labels: Tensor, **layout: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute the summed cross-entropy and the number of correct predictions.

        The same as `RoFormerForMaskedLM` with `sparse_prediction`, for BERT and decoders too, but
        with indices in place of a mask, which needs no synchronisation of a GPU, and as a sum: the
        mean is over the predicted tokens of all micro-batches and processes of a step.

        Args:
            input_ids: [B, L], or packed [1, T].
            label_positions: [n] positions in the flattened `input_ids` whose hidden states predict.
            labels: [n] token ids to predict; -100 is ignored.
            **layout: `attention_mask` [B, L], or for a packed row `position_ids` [1, T],
                `cu_seq_lens_q` [B + 1] and `max_length_q`; as from `batching.make_batch`.

        Returns:
            Loss in nats, float32 scalar, and a count, scalar.
        """
        if self.causal:
            layout["use_cache"] = False
        if isinstance(self.model, RoFormerPreTrainedModel):
            layout["unpad"] = True
        hidden = self.model.base_model(input_ids=input_ids, **layout).last_hidden_state
        logits = self.model.cls(hidden.flatten(0, 1).index_select(0, label_positions))  # [n, V]
        return self.cross_entropy(logits, labels)


def build_language_model(
    settings: ModelSettings, config: PreTrainedConfig, seed: int
) -> LanguageModel:
    """Build the model of a configuration with its loss, in float32."""
    model = build_model(settings, config, seed)
    if settings.gradient_checkpointing:
        # renamed in transformers after 5.17
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
    return LanguageModel(model)


def check_model(settings: ModelSettings, length: int) -> None:
    """Check type, configuration, attention kernel and head by building the model without memory."""
    config = build_config(settings, length)
    with torch.device("meta"):
        LanguageModel(build_model(dataclasses.replace(settings, init=None), config, seed=0))


class CrossEntropy(nn.Module):
    """Summed cross-entropy in float32; a module, because modules are what Accelerate compiles."""

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss and the number of correct predictions of logits [n, V], labels [n]."""
        logits = logits.float()
        correct = (logits.detach().argmax(dim=-1) == labels).sum()
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum"), correct
