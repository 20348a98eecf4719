"""What the benchmark compares: models of equal size, one batch, and a step of each as a function.

Every peer computes the same masked-LM loss on the same tokens with the same optimiser, as its
users would: transformers' models from padded rows with their own loss, ours as the pretraining loop
does it.
"""

import ctypes
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

import roformer
from roformer import modeling_roformer
from roformer.kernels import attention, dropout, linear
from roformer.kernels.attention import UNPADDED
from train.data.batching import packed_layout
from train.loop import objective
from train.loop.objective import LanguageModel
from train.loop.optim import adamw

Step = Callable[[], None]

VOCABULARY = 30522
MASK_RATE = 0.15
PADDED = 0.41
"""Share of padding where there is any, as in unsorted batches of short texts."""

SIZES = {
    "tiny": (2, 32, 2),
    "small": (4, 256, 4),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}
"""Layers, width, heads; the feed-forward block is four times as wide."""

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Of glibc's malloc.h."""

OURS = "this RoFormer"
OUR_BERT = "BERT in this loop"
DENSE = "torch's dense layers"
STOCK = "transformers RoFormer"
BERT = "transformers BERT (sdpa)"
MODERN = "transformers ModernBERT (sdpa, sparse head)"


@dataclass(frozen=True)
class Work:
    """What a step computes.

    Attributes:
        size: One of `SIZES`.
        batch: Sequences.
        length: Tokens of the longest.
        bf16: Autocast to bfloat16 instead of float32.
        dropout: Of embeddings, projections and attention probabilities.
        padded: Sequences are of different lengths, `PADDED` of the rows is padding.
        device: cpu or cuda.
        compiled: Through torch.compile, but for transformers' RoFormer.
        attention_dropout: Of attention probabilities, where it is another.
    """

    size: str = "small"
    batch: int = 8
    length: int = 512
    bf16: bool = False
    dropout: float = 0.1
    padded: bool = False
    device: str = "cpu"
    compiled: bool = False
    attention_dropout: float | None = None

    def __str__(self) -> str:
        parts = [self.size, f"{self.batch} x {self.length}", "bf16" if self.bf16 else "fp32"]
        parts.append(f"dropout {self.dropout:g}")
        if self.attention_dropout is not None:
            parts[-1] += f", {self.attention_dropout:g} in attention"
        return ", ".join(parts + [f"{PADDED:.0%} padding"] * self.padded)

    def lengths(self) -> np.ndarray:
        """Tokens of each sequence."""
        shortest = (1 - 2 * PADDED) * self.length if self.padded else self.length
        return np.linspace(self.length, shortest, self.batch).round().astype(np.int64)

    @property
    def tokens(self) -> int:
        """Real ones."""
        return int(self.lengths().sum())


@dataclass(frozen=True)
class Batch:
    """One batch in both layouts; `label_positions` and `labels` belong to the packed one."""

    ids: Tensor
    mask: Tensor
    labels: Tensor
    packed: dict[str, Any]

    @classmethod
    def of(cls, work: Work) -> "Batch":
        """Random tokens, 15 % of them predicted."""
        lengths = work.lengths()
        shape = (work.batch, work.length)
        ids = torch.randint(5, VOCABULARY, shape)
        real = torch.arange(work.length) < torch.from_numpy(lengths)[:, None]
        labels = ids.masked_fill((torch.rand(shape) > MASK_RATE) | ~real, -100)
        row = labels[real]
        places = (row >= 0).nonzero()[:, 0]
        packed = packed_layout(lengths) | {
            "input_ids": ids[real][None], "label_positions": places, "labels": row[places]
        }  # fmt: skip
        moved = {k: v.to(work.device) if torch.is_tensor(v) else v for k, v in packed.items()}
        ids, mask, labels = (x.to(work.device) for x in (ids, real.long(), labels))
        return cls(ids, mask, labels, moved)


def model_of(name: str, work: Work) -> PreTrainedModel:
    """The peer with random weights, its fastest kernel that needs nothing installed."""
    layers, width, heads = SIZES[work.size]
    attention = work.dropout if work.attention_dropout is None else work.attention_dropout
    fields = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "max_position_embeddings": max(512, work.length),
    }
    bert = fields | {
        "intermediate_size": 4 * width,
        "hidden_dropout_prob": work.dropout,
        "attention_probs_dropout_prob": attention,
    }
    if name == STOCK:
        return transformers.RoFormerForMaskedLM(transformers.RoFormerConfig(**bert))
    if name in (BERT, OUR_BERT):
        return transformers.BertForMaskedLM._from_config(
            transformers.BertConfig(**bert), attn_implementation="sdpa"
        )
    if name == MODERN:
        gated = {
            "intermediate_size": 8 * width // 3,  # a gated block of as many weights
            "layer_types": ["full_attention"] * layers,
            "sparse_prediction": True,
            "pad_token_id": 0,
        } | dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 1)
        dropouts = dict.fromkeys(("mlp_dropout", "embedding_dropout"), work.dropout)
        dropouts["attention_dropout"] = attention
        config = transformers.ModernBertConfig(**fields, **gated, **dropouts)
        return transformers.ModernBertForMaskedLM._from_config(config, attn_implementation="sdpa")
    return roformer.RoFormerForMaskedLM._from_config(
        roformer.RoFormerConfig(**bert), attn_implementation=UNPADDED
    )


def training_step(name: str, work: Work, batch: Batch) -> Step:
    """Forward, backward and AdamW of a peer."""
    model: nn.Module = model_of(name, work).to(work.device).train()
    ids, mask, labels = batch.ids, batch.mask, batch.labels
    inputs = batch.packed
    if name == OUR_BERT:
        places = (labels.flatten() >= 0).nonzero()[:, 0]
        targets = labels.flatten()[places]
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "label_positions": places,
            "labels": targets,
        }
    loop = name in (OURS, OUR_BERT)
    module: Any = LanguageModel(model) if loop else model
    if work.compiled and name != STOCK:
        module = torch.compile(module, dynamic=False)
    optimizer = adamw(model, 1e-4, 0.01)

    def step() -> None:
        with autocast(work):
            if loop:
                loss = module(**inputs)[0] / len(inputs["labels"])
            else:
                loss = module(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def forward_step(name: str, work: Work, batch: Batch) -> Step:
    """The encoder alone, without gradients; bfloat16 means the weights."""
    dtype = torch.bfloat16 if work.bf16 else torch.float32
    encoder = model_of(name, work).base_model.to(work.device, dtype).eval()

    def step() -> None:
        with torch.no_grad():
            encoder(input_ids=batch.ids, attention_mask=batch.mask)

    return step


def autocast(work: Work) -> torch.autocast:
    """The precision of a step."""
    return torch.autocast(work.device, torch.bfloat16, enabled=work.bf16)


def with_other(step: Step, *parts: tuple[Any, str, Any]) -> Step:
    """The step with parts of the code replaced: (module, name, by what)."""

    def changed() -> None:
        with ExitStack() as stack:
            for holder, name, other in parts:
                stack.enter_context(patch.object(holder, name, other))
            step()

    return changed


def without_positions(step: Step) -> Step:
    """The step of a RoFormer that rotates nothing."""

    def tables(positions: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(*positions.shape, 1, device=positions.device)
        return zeros, zeros

    same = (modeling_roformer, "apply_rotary", lambda x, *rest: x)
    return with_other(step, same, (modeling_roformer, "rotary_embeddings", tables))


def without_levers(step: Step) -> dict[str, Step]:
    """The step without what makes it fast on a CPU, one by one."""

    def never(x: Tensor) -> bool:
        return False

    def loss(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        right = (scores.argmax(dim=-1) == targets).sum()
        return F.cross_entropy(scores.float(), targets, reduction="sum"), right

    return {
        DENSE: with_other(step, (linear, "is_plain", never)),
        "torch's cross-entropy": with_other(step, (objective, "cross_entropy", loss)),
        "torch's attention": with_other(step, (attention, "is_plain", never)),
        "torch's dropout": with_other(step, (dropout, "is_plain", never)),
    }


def keep_freed_memory() -> None:
    """Have glibc keep what tensors give back, as other allocators do; it cannot be undone.

    Large tensors otherwise go back to the system each time, and every page of the next is made and
    cleared anew: half of a long text's time, 5 % of a step of four layers of 256 in bfloat16. Only
    for measuring: what is kept lies in pieces, so that a step may fail where memory is short.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if change is not None:
        change(MMAP_MAX, 0)
        change(TRIM_THRESHOLD, -1)
