"""Models that the benchmark compares, and one training step or forward pass of each.

All have the same size and compute the same masked-LM loss on the same tokens with the same
optimizer, each as its users would run it: transformers' models and default options on padded rows
with their own loss or under `Trainer`, explicit options as in this project's pretraining loop.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from accelerate.utils import compile_regions, send_to_device
from torch import Tensor, nn

import roformer
from roformer.configuration_roformer import FEATURE_MAPS
from roformer.kernels.attention import UNPADDED
from train.data.batching import packed_layout
from train.data.masking import IGNORE_INDEX
from train.data.vocabulary import byte_tokenizer
from train.loop.language_model import LanguageModel
from train.loop.optim import adamw

Step = Callable[[], object]

Seconds = dict[str, list[float]]
"""Model -> seconds of its step in each turn."""

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

PRETRAINING_STEPS = 3
CLASSIFICATION_STEPS = 10
"""Optimizer steps of one call of `Trainer.train`, which adds about 0.25 s on a CPU."""

MRPC_LENGTHS = (53, 15, 20, 100)
"""Mean, standard deviation, minimum and maximum of the lengths of pairs in MRPC, in tokens."""

OURS = "this RoFormer"
DEFAULT = "this RoFormer, default options"
SPARSE = "this RoFormer, sparse_prediction=True"
LINEAR = {f"this RoFormer, linear attention {kind}": kind for kind in FEATURE_MAPS}
STOCK = "transformers RoFormer"
BERT = "transformers BERT (sdpa)"
MODERN = "transformers ModernBERT (sdpa, sparse head)"


@dataclass(frozen=True)
class Workload:
    """Model size (a key of `SIZES`), batch and precision of a measured step.

    With `bf16`, training is under autocast, and inference has its weights in bfloat16. `dropout` is
    that of embeddings, projections and attention probabilities. The lengths of a padded batch
    differ, so that `PADDING_SHARE` of the rows is padding. `OURS` is `compiled` layer by layer, as
    the loop does it, others as a whole, and transformers' RoFormer, which breaks graphs, not at
    all.
    """

    size: str = "small"
    batch: int = 8
    length: int = 512
    bf16: bool = False
    dropout: float = 0.1
    padded: bool = False
    device: str = "cpu"
    compiled: bool = False

    def __str__(self) -> str:
        parts = [self.size, f"{self.batch} x {self.length}", "bf16" if self.bf16 else "fp32"]
        parts.append(f"dropout {self.dropout:g}")
        return ", ".join(parts + [f"{PADDING_SHARE:.0%} padding"] * self.padded)

    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, [batch]."""
        shortest = (1 - 2 * PADDING_SHARE) * self.length if self.padded else self.length
        return np.linspace(self.length, shortest, self.batch).round().astype(np.int64)

    @property
    def tokens(self) -> int:
        """Tokens of the batch without padding."""
        return int(self.lengths().sum())


def random_batch(workload: Workload) -> dict[str, Tensor]:
    """Draw input_ids, attention_mask and labels, [B, L], the same for all models of a comparison.

    `MASK_RATE` of the tokens are to be predicted; the labels of the others are `IGNORE_INDEX`.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (workload.batch, workload.length)
    input_ids = torch.randint(5, VOCAB_SIZE, shape, generator=generator)
    mask = torch.arange(workload.length) < torch.from_numpy(workload.lengths())[:, None]
    unlabelled = (torch.rand(shape, generator=generator) > MASK_RATE) | ~mask
    labels = input_ids.masked_fill(unlabelled, IGNORE_INDEX)
    batch = {"input_ids": input_ids, "attention_mask": mask.long(), "labels": labels}
    return send_to_device(batch, workload.device)


def packed_batch(workload: Workload) -> dict[str, Any]:
    """Return the tokens of `random_batch` as one packed row, the arguments of `LanguageModel`."""
    batch = random_batch(workload)
    is_token = batch["attention_mask"].bool()
    labels = batch["labels"][is_token]
    label_indices = (labels >= 0).nonzero()[:, 0]
    inputs = packed_layout(workload.lengths()) | {
        "input_ids": batch["input_ids"][is_token][None],
        "label_indices": label_indices,
        "labels": labels[label_indices],
    }
    return send_to_device(inputs, workload.device)


def make_model(name: str, workload: Workload) -> transformers.PreTrainedModel:
    """Return a model with random weights and its fastest kernel that needs no further package."""
    layers, width, heads = SIZES[workload.size]
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
        "attention_probs_dropout_prob": workload.dropout,
    }
    if name == STOCK:
        return transformers.RoFormerForMaskedLM(transformers.RoFormerConfig(**fields))
    if name == BERT:
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
            **{f"{part}_dropout": workload.dropout for part in ("mlp", "embedding", "attention")},
        )
        return transformers.ModernBertForMaskedLM._from_config(config, attn_implementation="sdpa")
    config = roformer.RoFormerConfig(
        **fields, sparse_prediction=name == SPARSE, linear_attention=LINEAR.get(name)
    )
    model = roformer.RoFormerForMaskedLM(config)
    if name == OURS:
        model.set_attn_implementation(UNPADDED)
    return model


def make_training_step(name: str, workload: Workload) -> Step:
    """Return a function that runs forward, backward and AdamW of a model once."""
    model: nn.Module = make_model(name, workload).to(workload.device).train()
    in_our_loop = name == OURS
    inputs = packed_batch(workload) if in_our_loop else random_batch(workload)
    module: Any = LanguageModel(model) if in_our_loop else model
    if workload.compiled and name != STOCK:
        compiler: Any = compile_regions if in_our_loop else torch.compile
        module = compiler(module, dynamic=False)
    optimizer = adamw(model, 1e-4, 0.01)

    def step() -> None:
        with torch.autocast(workload.device, torch.bfloat16, enabled=workload.bf16):
            outputs = module(**inputs)
            loss = outputs[0] / len(inputs["labels"]) if in_our_loop else outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_forward_step(name: str, workload: Workload, logits: bool = False) -> Step:
    """Return a function that computes hidden states, or logits of all tokens, without gradients."""
    dtype = torch.bfloat16 if workload.bf16 else torch.float32
    model = make_model(name, workload).to(workload.device, dtype).eval()
    module = model if logits else model.base_model
    inputs = random_batch(workload)
    del inputs["labels"]
    return torch.no_grad()(lambda: module(**inputs))


def make_pretraining_step(name: str, workload: Workload) -> Step:
    """Return a function that trains a model for `PRETRAINING_STEPS` steps on masked tokens."""
    ids = random_batch(workload)["input_ids"].tolist()
    rows = [{"input_ids": x} for x in ids] * PRETRAINING_STEPS
    return make_trainer_step(make_model(name, workload), rows, workload, masked=True)


def make_classification_step(name: str, workload: Workload) -> Step:
    """Return a function that fine-tunes a classifier for `CLASSIFICATION_STEPS` steps."""
    config = make_model(name, workload).config
    classes = transformers if name == STOCK else roformer
    rng = np.random.default_rng(0)
    mean, deviation, low, high = MRPC_LENGTHS
    drawn = rng.normal(mean, deviation, workload.batch * CLASSIFICATION_STEPS)
    lengths = drawn.clip(low, high).astype(int)
    rows = [
        {"input_ids": rng.integers(5, VOCAB_SIZE, length).tolist(), "label": int(length) % 2}
        for length in lengths
    ]
    model = classes.RoFormerForSequenceClassification(config)
    return make_trainer_step(model, rows, workload, masked=False)


def make_trainer_step(
    model: transformers.PreTrainedModel,
    rows: list[dict[str, Any]],
    workload: Workload,
    masked: bool,
) -> Step:
    """Return `train` of a Trainer without saving and logging, with masks or its own collator."""
    tokenizer = byte_tokenizer()  # pads and masks; the ids are drawn
    masking = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASK_RATE)
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=len(rows) // workload.batch,
        per_device_train_batch_size=workload.batch,
        bf16=workload.bf16,
        use_cpu=workload.device == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        data_collator=masking if masked else None,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer.train


STEPS: dict[str, Callable[[str, Workload], Step]] = {
    "inference": make_forward_step,
    "inference with logits": partial(make_forward_step, logits=True),
    "training": make_training_step,
    "pretraining": make_pretraining_step,
    "classification": make_classification_step,
}
"""Task -> the function that returns a step of a model; in the last two it is `Trainer.train`."""


def time_models(task: str, names: Sequence[str], workload: Workload, turns: int) -> Seconds:
    """Time a step of each model on the same batch alternately, after a turn for warming up.

    The steps are those of a task, a key of `STEPS`; on cuda a turn repeats each ten times.
    """
    steps = {name: STEPS[task](name, workload) for name in names}
    seconds: Seconds = {name: [] for name in names}
    repeats = 10 if workload.device == "cuda" else 1
    synchronize = torch.get_device_module(workload.device).synchronize
    for turn in range(turns + 1):
        # the order is reversed every other turn, so that no step always follows the same one
        for name in list(steps)[:: -1 if turn % 2 else 1]:
            synchronize()
            started = time.perf_counter()
            for _ in range(repeats):
                steps[name]()
            synchronize()
            seconds[name].append((time.perf_counter() - started) / repeats)
    return {name: values[1:] for name, values in seconds.items()}
