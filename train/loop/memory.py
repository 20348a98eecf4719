"""Memory of a micro-batch and of a run: micro-batches that fit, and the dry run."""

import dataclasses
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, send_to_device
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.data import vocabulary
from train.data.batching import StepDataset, label_capacity, packed_layout
from train.loop.language_model import LanguageModel, build_config, build_language_model
from train.loop.launch import any_process
from train.loop.optim import count_steps
from train.settings import InputError, PretrainSettings

ADAM_BYTES = 16
"""Bytes per parameter of weight, gradient and two moments in float32."""

SAVED_BYTES = 12
"""Bytes per parameter of weight and moments in a checkpoint."""

OUT_OF_MEMORY = (
    "can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory",
    "status_alloc_failed",
)  # fmt: skip
"""In the messages of torch's allocators and mmap, and of cuBLAS and cuDNN."""


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of a GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS: bytes, Linux: KiB


def largest_batch(
    language_model: LanguageModel, rows: int, length: int, mask_rate: float
) -> dict[str, Any]:
    """Build `rows` sequences of random tokens, with the largest shapes that a run usually meets.

    A decoder predicts all tokens, an encoder `label_capacity` of them.
    """
    ids = torch.randint(language_model.model.config.vocab_size, (rows, length))
    labelled = rows * length
    if not language_model.causal:
        labelled = label_capacity(rows * length, mask_rate)
    positions = torch.arange(labelled) * rows * length // labelled
    batch: dict[str, Any] = {"label_indices": positions, "labels": ids.flatten()[positions]}
    if not language_model.packed:
        return batch | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return batch | packed_layout(np.full(rows, length)) | {"input_ids": ids.view(1, -1)}


def fit_micro_batches(
    datasets: list[StepDataset], model: nn.Module, has_moments: bool, accelerator: Accelerator
) -> None:
    """Reduce, in place, the micro-batch of every stage to one that fits, on all processes.

    Under DDP gradients are then reduced once, because DDP changes the order in which it adds them
    up after the first time: a resumed run would have the first order for one step more.
    """
    for dataset in datasets:
        length, rate = dataset.sequences.length, dataset.batch_format.mask_rate
        dataset.micro_batch = fit_micro_batch(
            model, has_moments, length, dataset.micro_batch, rate, accelerator
        )
    if isinstance(model, DistributedDataParallel):
        # of the last stage: any batch would do
        batch = largest_batch(model.module, dataset.micro_batch, length, rate)
        _compute_gradients(model, batch, accelerator, synchronize=True)
        model.zero_grad(set_to_none=True)


def fit_micro_batch(
    model: nn.Module,
    has_moments: bool,
    length: int,
    micro_batch: int,
    mask_rate: float,
    accelerator: Accelerator,
) -> int:
    """Find the largest micro-batch of sequences of `length` that fits into memory everywhere.

    `model` is a `LanguageModel`, as Accelerate has prepared it; `has_moments` tells whether the
    optimizer has its moments, as in a resumed run, or needs memory for them. Only divisors of
    `micro_batch` are tried, each at most half of the one before, because all processes must compute
    the same number of micro-batches per step; the rest is accumulated. This happens before the
    first step, because a process that runs out of memory later would leave the others waiting.
    Losses stay the same, except with dropout.

    Raises:
        InputError: Not even one sequence fits, or with FSDP not `micro_batch` of them.
    """
    language_model = accelerator.unwrap_model(model, keep_torch_compile=False)
    size = micro_batch
    while True:
        batch = largest_batch(language_model, size, length, mask_rate)
        compute_gradients = partial(_compute_gradients, model, batch, accelerator)
        fits = fits_into_memory(model, has_moments, compute_gradients)
        if not fits and accelerator.distributed_type == DistributedType.FSDP:
            # the other processes may wait for a part of this one's weights, so it has to end
            raise InputError(
                f"optim.micro_batch must fit into memory with FSDP, got {size} sequences of "
                f"{length} tokens, which do not; lower it, or the stage's own"
            )
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()  # nothing without CUDA
        if not any_process(not fits, accelerator):
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()  # failed attempts are not the run's peak
            return size
        if size == 1:
            raise InputError(
                f"corpus.length must fit into memory, got {length} tokens that do not; set "
                "model.gradient_checkpointing true, or shorten it under another run.name"
            )
        size = next(part for part in range(size // 2, 0, -1) if micro_batch % part == 0)
        reduced = f"optim.micro_batch is {size} for length {length} in this launch"
        accelerator.print(f"warning: out of memory; {reduced}")


def fits_into_memory(
    model: nn.Module, has_moments: bool, compute_gradients: Callable[[], object]
) -> bool:
    """Compute gradients beside the two moments of AdamW; return False if memory runs out.

    Its first step allocates the moments; `has_moments` tells whether the optimizer has them.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        moments = [torch.empty_like(p) for p in trained for _ in range(0 if has_moments else 2)]
        compute_gradients()
        del moments
    except (MemoryError, RuntimeError) as error:
        is_known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_known and not any(message in str(error).lower() for message in OUT_OF_MEMORY):
            raise
        return False
    return True


def _compute_gradients(
    model: nn.Module, batch: dict[str, Any], accelerator: Accelerator, synchronize: bool = False
) -> None:
    # after no_sync, FSDP2 would keep gradients that zero_grad does not free
    synchronize |= accelerator.is_fsdp2
    with nullcontext() if synchronize else accelerator.no_sync(model):
        loss, _ = model(**send_to_device(batch, accelerator.device))
        accelerator.backward(loss / len(batch["labels"]))
        loss.item()  # waits for a GPU


def dry_run(
    settings: PretrainSettings, stages: list[PretrainSettings], accelerator: Accelerator
) -> None:
    """Print what a run would take, as JSON, and write nothing.

    Printed are parameters, micro-batches, tokens per step, steps, hours, memory and disk in GB.
    Time and memory are measured on one micro-batch of each of its `stages`.
    """
    language_model = _untrained_model(settings).to(accelerator.device)
    language_model.choose_attention(accelerator)
    steps = [count_steps(stage.optim, stage.corpus.length) for stage in stages]
    micro_batches, tokens, hours, peak = [], 0, 0.0, 0
    for stage, stage_steps in zip(stages, steps):
        rows, seconds = _measure_micro_batch(language_model, stage, accelerator)
        peak = max(peak, peak_memory(accelerator.device))  # each stage begins to count anew
        micro_batches.append(rows)
        tokens += stage.optim.batch_size * stage.corpus.length * stage_steps
        per_process = stage.optim.batch_size / rows / accelerator.num_processes
        hours += stage_steps * per_process * seconds / 3600
    if settings.optim.warmup_steps >= sum(steps):
        accelerator.print(
            f"warning: optim.warmup_steps is {settings.optim.warmup_steps}, and the run may have "
            f"{sum(steps)} steps only"
        )
    parameters = sum(p.numel() for p in language_model.parameters())
    # the measured peak holds weights and gradients, but no moments
    memory_bytes = peak + (ADAM_BYTES - 8) * parameters
    report = {
        "parameters": parameters,
        "micro_batch": micro_batches,
        "tokens_per_step": [s.optim.batch_size * s.corpus.length for s in stages],
        # more steps if sequences are shorter than the longest
        "steps_at_least" if settings.optim.tokens else "steps": steps,
        "tokens_at_most": tokens,
        "hours": round(hours, 2),
        "memory_gb": round(memory_bytes / 1e9, 2),
        "checkpoints_gb": round(SAVED_BYTES * parameters * (settings.run.keep + 2) / 1e9, 2),
        "processes": accelerator.num_processes,
    }
    accelerator.print(json.dumps(report, indent=2))


def _untrained_model(settings: PretrainSettings) -> LanguageModel:
    """Build the run's model with random weights, and the vocabulary size it would get."""
    corpus, model, tokenizer = settings.corpus, settings.model, None
    vocabulary.check_tokenizer_settings(corpus)
    name, size = corpus.tokenizer, corpus.vocabulary_size
    if name is not None and (size is None or Path(name).exists()):
        tokenizer = vocabulary.load_tokenizer(name)
    else:  # not trained yet: assume the largest size
        model = dataclasses.replace(model, config={"vocab_size": size} | model.config)
    config = build_config(model, corpus.length, tokenizer)
    return build_language_model(dataclasses.replace(model, init=None), config, settings.run.seed)


def _measure_micro_batch(
    language_model: LanguageModel, stage: PretrainSettings, accelerator: Accelerator
) -> tuple[int, float]:
    """Return a micro-batch that fits, and the seconds of its forward and backward pass."""
    length, size, mask_rate = stage.corpus.length, stage.optim.micro_batch, stage.corpus.mask_rate
    with accelerator.autocast():
        rows = fit_micro_batch(language_model, False, length, size, mask_rate, accelerator)
    batch = largest_batch(language_model, rows, length, mask_rate)
    for _ in range(2):  # the second counts
        started = time.perf_counter()
        with accelerator.autocast():
            _compute_gradients(language_model, batch, accelerator)
        seconds = time.perf_counter() - started
    language_model.zero_grad(set_to_none=True)
    return rows, seconds
