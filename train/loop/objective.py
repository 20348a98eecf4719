"""Model and loss of masked and causal language modelling, computed at predicted positions only.

An encoder predicts masked tokens, a decoder (`is_decoder` in its configuration) every next token.
The vocabulary layer is most of a small model's arithmetic: without the 85 % of positions that are
not predicted, the head is 6 times faster, and a whole step 3 times (4 x 256 tokens, V = 30,522).
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from roformer.kernels.attention import UNPADDED
from roformer.kernels.dispatch import is_plain
from roformer.modeling_roformer import RoFormerPreTrainedModel
from train.data.batching import IGNORE_INDEX
from train.loop.model_init import build_config, build_model
from train.settings import InputError, ModelSettings

ELEMENTS_AT_A_TIME = 2**20
"""Scores a CPU looks at in one go: 4 MiB of float32."""


class LanguageModel(nn.Module):
    """A model with a language-model head, as one module from batch to loss.

    Args:
        model: A model whose head is at `cls`, as in transformers' BERT and RoFormer.

    Raises:
        InputError: The model has no such head, or does not support its attention kernel.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        if not hasattr(model, "cls"):
            raise InputError(
                "model.type must keep its language-model head under `cls`, as roformer and bert "
                f"do, got {model.config.model_type!r}; use one of those"
            )
        self.model = model
        if self.packed and not isinstance(model, RoFormerPreTrainedModel):
            raise InputError(
                "model.attention must be a kernel that model.type knows, got "
                f"{UNPADDED!r} for {model.config.model_type!r}; use sdpa or train a roformer"
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
        """Whether batches have to be packed rows: with the unpadded kernel.

        Position encodings that add a bias to the attention scores still need padded rows.
        """
        biased = getattr(self.model.config, "has_position_bias", False)
        return self.model.config._attn_implementation == UNPADDED and not biased

    @property
    def causal(self) -> bool:
        """Whether the model predicts every next token instead of masked ones."""
        return bool(getattr(self.model.config, "is_decoder", False))

    def tie_weights(self) -> None:
        """Tie the output layer to the embeddings; called by Accelerate after sharding."""
        self.model.tie_weights()

    def forward(
        self, input_ids: Tensor, label_positions: Tensor, labels: Tensor, **layout: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute the summed cross-entropy and the number of correct predictions.

        Sums, because the mean is over the predicted tokens of the whole step, which spans several
        micro-batches and processes.

        Args:
            input_ids: [B, L], or packed [1, T].
            label_positions: [n] positions in the flattened `input_ids` whose hidden states predict.
            labels: [n] token ids to predict; -100 is ignored.
            **layout: `attention_mask` [B, L], or for a packed row `position_ids` [1, T],
                `cu_seq_lens_q` [B + 1] and `max_length_q`, as from `batching.make_batch`.

        Returns:
            Loss in nats, float32 scalar, and a count, scalar.
        """
        if self.causal:
            layout["use_cache"] = False
        hidden = self.model.base_model(input_ids=input_ids, **layout).last_hidden_state
        logits = self.model.cls(hidden.flatten(0, 1)[label_positions])  # [n, V]
        return cross_entropy(logits, labels)


def build_objective(settings: ModelSettings, config: PreTrainedConfig, seed: int) -> LanguageModel:
    """Build the model of a configuration with its loss, in float32."""
    model = build_model(settings, config, seed)
    if settings.gradient_checkpointing:
        # renamed in transformers after 5.17
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
    return LanguageModel(model)


def check_model(settings: ModelSettings, length: int) -> None:
    """Check type, configuration, attention kernel and head by building the model without memory.

    Raises:
        InputError: The model cannot be built, or not for sequences of this length.
    """
    config = build_config(settings, length)
    with torch.device("meta"):
        LanguageModel(build_model(dataclasses.replace(settings, init=None), config, seed=0))


def cross_entropy(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies in float32, and number of right guesses.

    Args:
        scores: [n, V], any floating dtype.
        targets: [n], `IGNORE_INDEX` counts for nothing.
    """
    if is_plain(scores):
        return _CrossEntropy.apply(scores, targets)
    scores = scores.float()
    with torch.no_grad():
        right = (scores.argmax(dim=-1) == targets).sum()
    return F.cross_entropy(scores, targets, ignore_index=IGNORE_INDEX, reduction="sum"), right


class _CrossEntropy(torch.autograd.Function):
    """Loss, guesses and gradient of some rows at a time, while they are in the cache of a CPU.

    torch's own functions read and write float32 scores of all rows, the largest tensor of a step,
    eight times.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As `cross_entropy`; the gradient is made here, where the powers are."""
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(scores) if wanted else scores
        loss = torch.zeros((), dtype=torch.float32, device=scores.device)
        right = torch.zeros((), dtype=torch.long, device=scores.device)
        rows = max(1, ELEMENTS_AT_A_TIME // scores.shape[-1])
        for part, names, out in zip(*(x.split(rows) for x in (scores, targets, gradient))):
            x = part.float()
            counted = names != IGNORE_INDEX
            own = names.masked_fill(~counted, 0)[:, None]
            top = x.amax(dim=-1, keepdim=True)
            chosen = x.gather(1, own)
            # a score can be the best and another its equal: the first of them is the guess
            best = ((chosen == top)[:, 0] & counted).nonzero()[:, 0]
            right += (x[best].argmax(dim=-1) == names[best]).sum()
            powers = (x - top).exp_()
            sums = powers.sum(dim=-1, keepdim=True)
            loss += (sums.log() + (top - chosen))[counted].sum()
            if wanted:
                powers.mul_(counted[:, None] / sums)
                powers.scatter_add_(1, own, -counted[:, None].float())
                out.copy_(powers)
        ctx.mark_non_differentiable(right)
        ctx.save_for_backward(gradient)
        return loss, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """What was made, times what comes in."""
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None
