"""The loss of any language model, computed where a token is predicted and nowhere else.

An encoder predicts masked tokens, a decoder (`is_decoder` of its configuration) every next one.

The vocabulary layer is most of a small model's arithmetic: skipping the 85 % of rows whose scores
nobody reads makes the head 6 times faster and a whole small step 3 times (4 x 256, V 30,522).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from roformer.kernels.attention import UNPADDED
from roformer.kernels.dispatch import is_plain
from roformer.modeling_roformer import RoFormerPreTrainedModel
from train.data.batching import IGNORE_INDEX
from train.settings import InputError

ELEMENTS_AT_A_TIME = 2**20
"""Scores a CPU looks at in one go: 4 MiB of float32."""


class LanguageModel(nn.Module):
    """An encoder or decoder with its language-model head, as one module from batch to loss.

    Args:
        model: A model with a head in transformers' BERT layout, under `cls`.

    Raises:
        InputError: The model keeps its head elsewhere, or cannot use its kernel.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        if not hasattr(model, "cls"):
            raise InputError(
                "model.type must keep its language-model head under `cls`, as roformer and bert "
                f"do, got {model.config.model_type!r}; use one of those"
            )
        if takes_packed_rows(model) and not isinstance(model, RoFormerPreTrainedModel):
            raise InputError(
                "model.attention must be a kernel that model.type knows, got "
                f"{UNPADDED!r} for {model.config.model_type!r}; use sdpa or train a roformer"
            )
        self.model = model
        head = getattr(model.cls, "predictions", None)
        if head is not None and getattr(head, "bias", None) is not None:
            # without tied weights nothing reads it, in transformers' models neither
            head.bias.requires_grad_(head.bias is head.decoder.bias)
        # what FSDP shards piece by piece: layers; not the embeddings, which the output layer shares
        names = model._no_split_modules or ()
        self._no_split_modules = [name for name in names if not name.endswith("Embeddings")]

    def tie_weights(self) -> None:
        """Share the embeddings with the output layer; Accelerate asks for it after sharding."""
        self.model.tie_weights()

    @property
    def packed(self) -> bool:
        """Whether batches come as one packed row: where the kernel knows borders."""
        return takes_packed_rows(self.model)

    @property
    def causal(self) -> bool:
        """Whether every next token is predicted, instead of masked ones."""
        return bool(getattr(self.model.config, "is_decoder", False))

    def forward(
        self, input_ids: Tensor, label_positions: Tensor, labels: Tensor, **layout: Any
    ) -> tuple[Tensor, Tensor]:
        """Sum of the cross-entropies and number of right guesses over the predicted tokens.

        Sums, not means: only the caller knows how many tokens the whole step predicts.

        Args:
            input_ids: [B, L], or one packed row [1, T].
            label_positions: [n] positions in the flattened `input_ids` whose hidden states predict.
            labels: [n] token ids to predict; -100 is ignored.
            **layout: `attention_mask` [B, L], or of a packed row `position_ids` [1, T],
                `cu_seq_lens_q` [B + 1] and `max_length_q`, as `batching.make_batch` makes them.

        Returns:
            Two scalars: loss in nats, float32, and a count.
        """
        encoder = self.model.base_model
        if self.causal:
            layout["use_cache"] = False
        hidden = encoder(input_ids=input_ids, **layout).last_hidden_state
        scores = self.model.cls(hidden.flatten(0, 1)[label_positions])  # [n, V]
        return cross_entropy(scores, labels)


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


def takes_packed_rows(model: PreTrainedModel) -> bool:
    """Whether the model's attention kernel is told the borders of sequences in a row.

    Encodings that are added to the scores have a kernel that would compute those between sequences.
    """
    added = getattr(model.config, "has_position_bias", False)
    return model.config._attn_implementation == UNPADDED and not added
