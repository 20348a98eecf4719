"""What fits into memory, and what a run would take: time, memory and disk."""

import gc
import json
import time
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from transformers import PreTrainedConfig

from train.data.batching import max_predictions
from train.loop.objective import LanguageModel
from train.loop.run_log import peak_memory
from train.settings import InputError, PretrainSettings

ADAM_BYTES = 16
"""Weight, gradient and two moments of a parameter in float32."""

SAVED_BYTES = 12
"""Weight and moments, as a checkpoint holds them."""


def largest_batch(
    rows: int, length: int, vocabulary: int, mask_rate: float | None, packed: bool
) -> dict[str, Any]:
    """A micro-batch of random tokens as large as any: full rows, and as many predicted as can be.

    Args:
        rows: Sequences.
        length: Tokens of each.
        vocabulary: Ids are below.
        mask_rate: Share of tokens that is masked; None predicts every token.
        packed: The layout, as in `batching.make_batch`.
    """
    ids = torch.randint(vocabulary, (rows, length))
    predicted = max_predictions(rows * length, mask_rate)
    places = torch.arange(predicted) * rows * length // predicted
    batch: dict[str, Any] = {"label_positions": places, "labels": ids.flatten()[places]}
    if not packed:
        return batch | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return batch | {
        "input_ids": ids.view(1, -1),
        "position_ids": torch.arange(length).repeat(rows)[None],
        "cu_seq_lens_q": torch.arange(0, rows * length + 1, length, dtype=torch.int32),
        "max_length_q": length,
    }


def fit_micro_batch(
    model: nn.Module,
    objective: LanguageModel,
    length: int,
    wanted: int,
    mask_rate: float | None,
    accelerator: Accelerator,
) -> int:
    """A micro-batch that every process can compute: `wanted`, or the next part of it that fits.

    Only sizes that divide `wanted` are tried, at most half of the last each time, because all
    processes must make the same number of micro-batches of a step. This happens before the first
    step, because a process that runs out of memory later leaves the others waiting for it. The rest
    of the batch is accumulated, so the losses are the same without dropout, and but for the random
    features of FAVOR+, which are drawn anew by the number of forward passes.

    Args:
        model: As prepared by Accelerate.
        objective: What it wraps.
        length: Longest sequence.
        wanted: Sequences.
        mask_rate: As in `largest_batch`.
        accelerator: Its processes agree.

    Raises:
        InputError: Not even one sequence fits.
    """
    size, before = wanted, [buffer.clone() for buffer in objective.buffers()]
    while True:
        batch = largest_batch(
            size, length, objective.model.config.vocab_size, mask_rate, objective.packed
        )
        failed = torch.tensor(float(not _fits(model, batch, accelerator)))
        model.zero_grad(set_to_none=True)
        for buffer, old in zip(objective.buffers(), before):  # random features count their calls
            buffer.copy_(old)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not accelerator.reduce(failed.to(accelerator.device)).item():
            return size
        if size == 1:
            raise InputError(
                f"corpus.length must fit into memory, got {length} tokens that do not; shorten it, "
                "or set model.gradient_checkpointing true"
            )
        size = next(part for part in range(size // 2, 0, -1) if wanted % part == 0)
        accelerator.print(f"warning: out of memory; optim.micro_batch is {size} in this launch")


def _fits(model: nn.Module, batch: dict[str, Any], accelerator: Accelerator) -> bool:
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        # AdamW's moments come with the first step: their room is taken here
        moments = [torch.empty_like(p) for p in trained for _ in range(2)]
        # FSDP2 would keep the gradients of an unsynchronised pass where zero_grad does not look
        sharded = accelerator.is_fsdp2
        with nullcontext() if sharded else accelerator.no_sync(model):
            loss, _ = model(**send_to_device(batch, accelerator.device))
            accelerator.backward(loss / len(batch["labels"]))
        del moments
    except (MemoryError, RuntimeError) as error:
        # torch's error for a CPU has no class of its own
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and (
            "allocate" not in str(error) and "not enough memory" not in str(error)
        ):
            raise
        return False
    return True


def plan(
    settings: PretrainSettings,
    stages: list[PretrainSettings],
    objective: LanguageModel,
    steps: list[int | None],
    accelerator: Accelerator,
) -> dict[str, Any]:
    """What the run would take, from one micro-batch that fits, timed here; nothing is written.

    Args:
        settings: Of the run.
        stages: Of its stages.
        objective: On the device.
        steps: Of each stage; None where the end is a time.
        accelerator: Says how many processes there would be.

    Returns:
        Parameters, micro-batches, tokens a step, steps, hours, memory and disk in GB, as JSON
        values.
    """
    parameters = sum(p.numel() for p in objective.parameters())
    seconds, tokens, hours, sizes = [], 0, 0.0, []
    for stage, number in zip(stages, steps):
        length, wanted = stage.corpus.length, stage.optim.micro_batch
        rate = None if objective.causal else stage.corpus.mask_rate
        with accelerator.autocast():
            rows = fit_micro_batch(objective, objective, length, wanted, rate, accelerator)
        sizes.append(rows)
        seconds.append(_time(objective, rows, length, rate, accelerator))
        share = stage.optim.batch_size / rows / accelerator.num_processes
        tokens += stage.optim.batch_size * stage.corpus.length * (number or 0)
        hours += (number or 0) * share * seconds[-1] / 3600
    memory_bytes = peak_memory(accelerator.device) + (ADAM_BYTES - 8) * parameters
    report = {
        "parameters": parameters,
        "micro_batch": sizes,
        "tokens_per_step": [s.optim.batch_size * s.corpus.length for s in stages],
        # a budget of tokens takes more where sequences are shorter than they may be
        "steps_at_least" if settings.optim.tokens else "steps": steps,
        "tokens_at_most": tokens or None,
        "hours": settings.optim.hours or round(hours, 2),
        "memory_gb": round(memory_bytes / 1e9, 2),
        "checkpoints_gb": round(SAVED_BYTES * parameters * (settings.run.keep + 2) / 1e9, 2),
        "processes": accelerator.num_processes,
    }
    accelerator.print(json.dumps(report, indent=2))
    return report


def _time(
    objective: LanguageModel, rows: int, length: int, rate: float | None, accelerator: Accelerator
) -> float:
    """Seconds of a forward and backward pass of a micro-batch of full length, the second of two."""
    config: PreTrainedConfig = objective.model.config
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # of sizes that did not fit
    batch = largest_batch(rows, length, config.vocab_size, rate, objective.packed)
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        with accelerator.autocast():
            loss, _ = objective(**send_to_device(batch, accelerator.device))
        (loss / len(batch["labels"])).backward()
        loss.item()  # waits for the device
        seconds = time.perf_counter() - started
    objective.zero_grad(set_to_none=True)
    return seconds
