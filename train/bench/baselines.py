"""Models that the benchmark compares, and one training step or forward pass of each.

All have the same size and compute the same masked-LM loss on the same tokens with the same
optimizer, each as its users would run it: transformers' models on padded rows with their own loss,
this project's as in its pretraining loop.
"""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import roformer
from roformer.kernels.attention import UNPADDED
from train.data.batching import packed_layout
from train.loop.objective import LanguageModel
from train.loop.optim import adamw

Step = Callable[[], None]

VOCAB_SIZE = 30522
MASK_RATE = 0.15
PADDING_SHARE = 0.4
"""Share of padding in a padded batch, as in unsorted batches of short texts."""

SIZES = {
    "tiny": (2, 32, 2),
    "small": (4, 256, 4),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}
"""num_hidden_layers, hidden_size, num_attention_heads; intermediate_size is four hidden_size."""

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Options of mallopt(3) in glibc."""

OURS = "this RoFormer"
OURS_WITHOUT_POSITIONS = "this RoFormer, position_encoding none"
DEFAULT = "this RoFormer, default options"
SPARSE = "this RoFormer, sparse_prediction=True"
OUR_BERT = "BERT in this loop"
STOCK = "transformers RoFormer"
BERT = "transformers BERT (sdpa)"
MODERN = "transformers ModernBERT (sdpa, sparse head)"

IN_OUR_LOOP = (OURS, OURS_WITHOUT_POSITIONS, OUR_BERT)


@dataclass(frozen=True)
class Workload:
    """Model size, batch and precision of a measured step.

    Attributes:
        size: A key of `SIZES`.
        batch: Sequences.
        length: Tokens of the longest sequence.
        bf16: bfloat16 instead of float32: autocast in training, weights in inference.
        dropout: Probability after embeddings and projections, and of attention probabilities.
        padded: Whether lengths differ, so that `PADDING_SHARE` of the rows is padding.
        device: cpu or cuda.
        compiled: Use torch.compile, except for transformers' RoFormer, which breaks graphs.
        attention_dropout: Dropout of attention probabilities where it differs from `dropout`.
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
        return ", ".join(parts + [f"{PADDING_SHARE:.0%} padding"] * self.padded)

    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, [batch]."""
        shortest = (1 - 2 * PADDING_SHARE) * self.length if self.padded else self.length
        return np.linspace(self.length, shortest, self.batch).round().astype(np.int64)

    @property
    def tokens(self) -> int:
        """Tokens of the batch without padding."""
        return int(self.lengths().sum())


@dataclass(frozen=True)
class BenchBatch:
    """One batch as padded rows and as a packed row.

    Attributes:
        input_ids: [B, L].
        attention_mask: [B, L].
        labels: [B, L], -100 where no token is predicted.
        packed: Arguments of `LanguageModel` for the packed row.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    packed: dict[str, Any]

    @classmethod
    def random(cls, workload: Workload) -> "BenchBatch":
        """Draw tokens, `MASK_RATE` of them to be predicted."""
        lengths = workload.lengths()
        shape = (workload.batch, workload.length)
        input_ids = torch.randint(5, VOCAB_SIZE, shape)
        mask = torch.arange(workload.length) < torch.from_numpy(lengths)[:, None]
        labels = input_ids.masked_fill((torch.rand(shape) > MASK_RATE) | ~mask, -100)
        packed = packed_layout(lengths) | {"input_ids": input_ids[mask][None]}
        packed |= predicted(labels[mask])
        device = workload.device
        packed = {k: v.to(device) if torch.is_tensor(v) else v for k, v in packed.items()}
        return cls(input_ids.to(device), mask.long().to(device), labels.to(device), packed)


def predicted(labels: Tensor) -> dict[str, Tensor]:
    """Positions and ids of the predicted tokens among flat labels, [n] each."""
    label_positions = (labels >= 0).nonzero()[:, 0]
    return {"label_positions": label_positions, "labels": labels[label_positions]}


def make_baseline(name: str, workload: Workload) -> PreTrainedModel:
    """Return a model with random weights and its fastest kernel that needs no further package."""
    layers, width, heads = SIZES[workload.size]
    attention_dropout = workload.attention_dropout
    attention_dropout = workload.dropout if attention_dropout is None else attention_dropout
    shared = {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "max_position_embeddings": max(512, workload.length),
    }
    fields = shared | {
        "intermediate_size": 4 * width,
        "hidden_dropout_prob": workload.dropout,
        "attention_probs_dropout_prob": attention_dropout,
    }
    if name == STOCK:
        return transformers.RoFormerForMaskedLM(transformers.RoFormerConfig(**fields))
    if name in (DEFAULT, SPARSE):
        config = roformer.RoFormerConfig(**fields, sparse_prediction=name == SPARSE)
        return roformer.RoFormerForMaskedLM(config)
    if name in (BERT, OUR_BERT):
        return transformers.BertForMaskedLM._from_config(
            transformers.BertConfig(**fields), attn_implementation="sdpa"
        )
    if name == MODERN:
        config = transformers.ModernBertConfig(
            **shared,
            intermediate_size=8 * width // 3,  # a gated block with as many weights
            layer_types=["full_attention"] * layers,
            sparse_prediction=True,
            pad_token_id=0,
            **dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 1),
            mlp_dropout=workload.dropout,
            embedding_dropout=workload.dropout,
            attention_dropout=attention_dropout,
        )
        return transformers.ModernBertForMaskedLM._from_config(config, attn_implementation="sdpa")
    encoding = "none" if name == OURS_WITHOUT_POSITIONS else "rope"
    return roformer.RoFormerForMaskedLM._from_config(
        roformer.RoFormerConfig(**fields, position_encoding=encoding), attn_implementation=UNPADDED
    )


def make_training_step(name: str, workload: Workload, batch: BenchBatch) -> Step:
    """Return a function that runs forward, backward and AdamW of a model once."""
    model: nn.Module = make_baseline(name, workload).to(workload.device).train()
    padded = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    inputs: dict[str, Any] = padded | {"labels": batch.labels}
    if name == OUR_BERT:
        inputs = padded | predicted(batch.labels.flatten())
    elif name in IN_OUR_LOOP:
        inputs = batch.packed
    module: Any = LanguageModel(model) if name in IN_OUR_LOOP else model
    if workload.compiled and name != STOCK:
        module = torch.compile(module, dynamic=False)
    optimizer = adamw(model, 1e-4, 0.01)

    def step() -> None:
        with torch.autocast(workload.device, torch.bfloat16, enabled=workload.bf16):
            outputs = module(**inputs)
            summed = name in IN_OUR_LOOP
            loss = outputs[0] / len(inputs["labels"]) if summed else outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_forward_step(name: str, workload: Workload, batch: BenchBatch) -> Step:
    """Return a function that runs the encoder of a model once, without gradients."""
    dtype = torch.bfloat16 if workload.bf16 else torch.float32
    encoder = make_baseline(name, workload).base_model.to(workload.device, dtype).eval()

    def step() -> None:
        with torch.no_grad():
            encoder(input_ids=batch.input_ids, attention_mask=batch.attention_mask)

    return step


def make_logits_step(name: str, workload: Workload, batch: BenchBatch) -> Step:
    """Return a function that computes the logits of all tokens once, without gradients."""
    dtype = torch.bfloat16 if workload.bf16 else torch.float32
    model = make_baseline(name, workload).to(workload.device, dtype).eval()

    def step() -> None:
        with torch.no_grad():
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)

    return step


def keep_freed_memory() -> None:
    """Make glibc keep freed memory in this process instead of returning it to the system.

    Large tensors are otherwise mapped and cleared anew by every allocation, which takes half of the
    time of a long text. Cannot be undone, and fragments memory; for measurements only.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
