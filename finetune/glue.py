"""Fine-tune one model on one task, of GLUE or your own, with one seed.

    accelerate launch --quiet --config_file configs/accelerate/cpu.yaml finetune/glue.py \
        --model FOLDER --task rte --learning_rate 2e-4 --glue_dir glue

Read `main`, `run` and `fine_tune`: together they are the whole run. The score is that of the
weights after the last epoch on the validation split; nothing is selected on the split that is
reported. Each run appends one line to the results file and writes its predictions beside it.
"""

import math
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from finetune.data import (
    Examples,
    Rows,
    epoch_batches,
    find_split_file,
    make_examples,
    read_rows,
    read_split_columns,
)
from finetune.metrics import score_fields
from finetune.models import load_config_and_tokenizer, load_model
from finetune.publish.model_card import save_with_card
from finetune.results import Result, prediction_file, write_answers, write_result
from finetune.run_info import format_result, run_fields, truncation_lines
from finetune.settings import GlueSettings
from finetune.tasks import TASKS, Task, load_task
from train.command_line import run_command
from train.data.stateless_rng import derive_seed
from train.loop.launch import start_accelerator
from train.loop.memory import fits_into_memory
from train.loop.optim import MIN_LOSS_SCALE, adamw, schedule_factor, set_learning_rate
from train.settings import InputError, first_line

Data = dict[str, Examples]
"""The tokenized splits of a run by name; the test split of AX is "ax"."""
Logits = dict[str, NDArray[np.float32]]
"""Split -> [N, num_labels]."""

CHECK_EVERY = 20
"""Steps between two checks for divergence, each of which synchronizes host and device."""


class DivergedError(ArithmeticError):
    """A gradient or a logit is not finite."""


def run(
    settings: GlueSettings, accelerator: Accelerator, bar_line: int = 0, quiet: bool = False
) -> Result:
    """Fine-tune, score, write the predictions, append the result; no scores if the run diverged.

    `bar_line` counts the lines from the cursor down to the progress bar. `quiet` prints nothing
    beside it: a grid prints the results itself.

    Raises:
        InputError: Settings, model and data do not fit together.
    """
    started = time.perf_counter()
    task = load_task(settings.task)
    if settings.save is not None and accelerator.distributed_type.value == "FSDP":
        raise InputError("save must be null with sharded weights, got FSDP; launch without FSDP")
    config, tokenizer = load_config_and_tokenizer(settings, task)
    with accelerator.local_main_process_first():  # the others read its cache
        data = load_data(settings, task, tokenizer)
    model = load_model(settings, config)
    check_forward(model, data, task)
    labels = {split: examples.labels for split, examples in data.items()}
    result = run_fields(settings, config.model_type, labels, accelerator)
    result["truncation"] = {split: examples.truncation for split, examples in data.items()}
    if not quiet:
        for line in truncation_lines(settings.length, result["truncation"]):
            accelerator.print(line)
    logits: Logits = {}
    try:
        losses, logits = fine_tune(settings, model, data, accelerator, bar_line)
        result |= {"status": "done"} | score_fields(task, logits, labels)
        result |= {"loss": losses[-1], "losses": losses}
    except DivergedError as error:
        result |= {"status": "diverged", "error": str(error), "metrics": None, "headline": None}
    result["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    result["seconds"] = round(time.perf_counter() - started, 2)
    if accelerator.is_main_process:
        answers = write_test_answers(settings, task, result, logits)
        write_result(settings.output, result, labels, logits)
        if settings.save is not None and logits:
            save_with_card(settings.save, model, tokenizer, result)
        if not quiet:
            print(format_result(result))
            if answers is not None:
                print(f"test rows with predictions: {answers}")
    return result


def fine_tune(
    settings: GlueSettings, model: nn.Module, data: Data, accelerator: Accelerator, bar_line: int
) -> tuple[list[float], Logits]:
    """Train the model in place, then predict every split but train; `bar_line` is that of `run`.

    Returns:
        Mean training loss of each epoch, and the logits of every split but train.

    Raises:
        DivergedError: A gradient or a logit is not finite.
    """
    train, batch_size, max_tokens = data["train"], settings.batch_size, settings.micro_batch_tokens
    rank, world_size = accelerator.process_index, accelerator.num_processes
    total_steps = settings.epochs * math.ceil(len(train) / batch_size)
    warmup_steps = math.ceil(settings.warmup_share * total_steps)  # as in transformers' Trainer
    factor = schedule_factor(settings.schedule, warmup_steps, total_steps)
    optimizer = adamw(model, settings.learning_rate, settings.weight_decay)
    model, optimizer = accelerator.prepare(model, optimizer)
    scaler = optimizer.scaler  # fp16 only: it skips steps while it searches its scale
    model.train()
    check_memory(model, train, batch_size, max_tokens, accelerator)
    suffix = ", random weights" if settings.random_weights else ""
    title = f"{settings.task} seed {settings.seed} {settings.model}{suffix}"
    disable = True if rank else None  # None: where the output is a terminal
    bar = tqdm(desc=title, total=total_steps, position=bar_line, leave=False, disable=disable)
    step, losses = 0, []
    for epoch in range(settings.epochs):
        epoch_loss = torch.zeros((), device=accelerator.device)
        for rows in epoch_batches(train.lengths, batch_size, settings.seed, epoch):
            # dropout is a function of seed, step and rank
            torch.manual_seed(derive_seed(settings.seed, step, rank))
            # with a warm-up 0 in the first step, as in transformers' Trainer
            set_learning_rate(optimizer, settings.learning_rate * factor(step))
            loss = compute_gradients(model, train, rows, max_tokens, accelerator)
            gradient_norm = accelerator.clip_grad_norm_(model.parameters(), settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            # fp16: a loss that is not finite counts as 0, a finite one of a skipped step as it is
            epoch_loss += loss if scaler is None else loss.nan_to_num(0, 0, 0)
            step += 1
            bar.update()
            if step % CHECK_EVERY == 0 or step == total_steps:
                if scaler is None:
                    check_finite(gradient_norm, f"gradient by step {step}")  # on every process
                elif scaler.get_scale() <= MIN_LOSS_SCALE:
                    raise DivergedError(f"gradient by step {step} not finite at any scale")
                bar.set_postfix(loss=f"{loss.item() * world_size / len(rows):.3f}", refresh=False)
        losses.append(accelerator.reduce(epoch_loss).item() / len(train))
    bar.close()
    splits = [split for split in data if split != "train"]
    return losses, {x: predict(model, data[x], settings, accelerator) for x in splits}


def compute_gradients(
    model: nn.Module, examples: Examples, rows: Rows, max_tokens: int, accelerator: Accelerator
) -> Tensor:
    """Accumulate the gradients of the mean loss over the rows [B] that all processes share.

    A micro-batch of one process has at most `max_tokens` tokens, or one row.

    Returns:
        The loss summed over this process's rows, scalar.
    """
    rank, world_size = accelerator.process_index, accelerator.num_processes
    micro_batches = examples.micro_batches(rows, max_tokens, world_size)
    loss = torch.zeros((), device=accelerator.device)
    for i, part in enumerate(micro_batches, start=1):
        shard = part[rank::world_size]
        # gradients are reduced over processes with the last micro-batch
        with nullcontext() if i == len(micro_batches) else accelerator.no_sync(model):
            # a process without a row joins the reduction with an empty loss
            batch = examples.batch(shard if len(shard) else part[:1], accelerator.device)
            labels = batch.pop("labels")[: len(shard)]
            part_loss = loss_sum(model(**batch).logits[: len(shard)], labels)
            # gradients are averaged over processes: this makes it the mean over the batch
            accelerator.backward(part_loss * world_size / len(rows))
        loss += part_loss.detach()
    return loss


def check_memory(
    model: nn.Module, train: Examples, batch_size: int, max_tokens: int, accelerator: Accelerator
) -> None:
    """Compute the gradients of the longest rows, so that a lack of memory shows before the run.

    Raises:
        InputError: The largest micro-batch does not fit into memory.
    """
    longest = np.argsort(train.lengths, kind="stable")[::-1][:batch_size]
    rows = train.micro_batches(longest, max_tokens, accelerator.num_processes)[0]
    gradients = partial(compute_gradients, model, train, rows, max_tokens, accelerator)
    if not fits_into_memory(model, has_moments=False, compute_gradients=gradients):
        raise InputError(
            f"micro_batch_tokens must fit into memory, got {max_tokens}; lower it or length"
        )
    model.zero_grad(set_to_none=True)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over rows the squared error of values [B], or the cross-entropy of class ids [B]."""
    if labels.is_floating_point():
        return F.mse_loss(logits.float().squeeze(-1), labels, reduction="sum")
    return F.cross_entropy(logits.float(), labels, reduction="sum")


@torch.no_grad()
def predict(
    model: nn.Module, examples: Examples, settings: GlueSettings, accelerator: Accelerator
) -> NDArray[np.float32]:
    """Compute the logits of all rows, [N, num_labels], the same on every process.

    Each process fills its own rows of a tensor of zeros and the tensors are summed, so that every
    row counts once whatever the numbers of rows and processes.
    """
    model.eval()
    num_labels, batch_size = load_task(settings.task).num_labels, settings.batch_size
    logits = torch.zeros(len(examples), num_labels, device=accelerator.device)
    order = np.argsort(examples.lengths, kind="stable")
    rank, world_size = accelerator.process_index, accelerator.num_processes
    max_tokens = settings.micro_batch_tokens
    for start in range(0, len(order), batch_size):
        batch_rows = order[start : start + batch_size]
        for rows in examples.micro_batches(batch_rows, max_tokens, world_size):
            shard = rows[rank::world_size]
            batch = examples.batch(shard if len(shard) else rows[:1], accelerator.device)
            batch.pop("labels")
            indices = torch.from_numpy(shard).to(logits.device)
            logits[indices] = model(**batch).logits.float()[: len(shard)]
    reduced = accelerator.reduce(logits).cpu().numpy()
    check_finite(reduced, f"logits of {len(reduced)} rows")
    return reduced


def check_finite(values: Tensor | NDArray, name: str) -> None:
    """Raise a DivergedError that begins with `name` if a value is infinite or nan."""
    if not bool(torch.isfinite(torch.as_tensor(values)).all()):
        raise DivergedError(f"{name} not finite")


def load_data(settings: GlueSettings, task: Task, tokenizer: Any) -> Data:
    """Load train, the validation splits and, with `settings.test`, the test splits."""
    # of the run's own task, except that the test split of AX is predicted after MNLI
    splits = {split: (task, split) for split in ("train", *task.validation_splits)}
    if settings.test:
        tests = find_test_splits(task, settings.glue_dir)
        if not tests:
            rule = "test must be false for a task without test rows"
            raise InputError(f"{rule}, got true for {task.name}; add rows, or leave it out")
        splits |= tests
    options = tokenizer, settings.length, settings.cache, settings.pair_encoding
    data = {}
    for name, (owner, split) in splits.items():
        columns = read_split_columns(owner, split, settings.glue_dir)
        data[name] = make_examples(owner, columns, *options)
    return data


def find_test_splits(task: Task, glue_dir: str | None) -> dict[str, tuple[Task, str]]:
    """Map names of predictions to (task, split) of the test splits that exist.

    For your own task and for the hub these are all test splits of the task; in `glue_dir` those
    that have a file. AX belongs to MNLI.
    """
    splits = {split: (task, split) for split in task.splits if split.startswith("test")}
    if task.name == "mnli":
        splits["ax"] = TASKS["ax"], "test"
    if task.is_own or glue_dir is None:
        return splits
    return {name: x for name, x in splits.items() if find_split_file(*x, glue_dir)}


def write_test_answers(
    settings: GlueSettings, task: Task, result: Result, logits: Logits
) -> Path | None:
    """Write test.csv: the test rows of your own task, all columns, with predictions.

    Returns:
        The file; None if there is nothing to write.
    """
    if not task.is_own or "test" not in logits:
        return None
    _, rows = read_rows(task, "test", None)
    file = prediction_file(settings.output, result, "test").with_suffix(".csv")
    write_answers(file, rows, task.labels, logits["test"])
    return file


@torch.no_grad()
def check_forward(model: nn.Module, data: Data, task: Task) -> None:
    """Send the longest and shortest example of one split through the model on the CPU.

    It is the split with the longest example.

    Raises:
        InputError: The model cannot take the tokenizer's output, or its head is not the task's.
    """
    examples = max(data.values(), key=lambda examples: int(examples.lengths.max()))
    order = np.argsort(examples.lengths, kind="stable")
    batch = examples.batch(order[[-1, 0]])
    batch.pop("labels")
    expected = (2, task.num_labels)
    try:
        shape = tuple(model.eval()(**batch).logits.shape)
        found = str(shape)
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        shape, found = None, first_line(error)
    if shape != expected:
        raise InputError(
            f"model must take the tokenizer's {', '.join(batch)} and give {task.num_labels} logits "
            f"a row, got {found}; check that model and tokenizer belong together, or shorten length"
        )


def main(settings: GlueSettings) -> None:
    """Run, and exit with code 1 if the run diverged."""
    accelerator = start_accelerator()
    result = run(settings, accelerator)
    accelerator.end_training()
    if result["status"] != "done":
        sys.exit(1)


if __name__ == "__main__":
    run_command(main, GlueSettings)
