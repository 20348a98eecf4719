"""Pretrain an encoder with masked language modelling: `accelerate launch train/pretrain.py`.

Without arguments it trains the demo's RoFormer on the documentation installed on this machine.
Read `main`, then `train`: that is the whole run.
"""

import atexit
import dataclasses
import math
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

import roformer
from train.data import stateless_rng, vocabulary
from train.data.batching import SequenceIndex, StepDataset, check_batch_size, max_predictions
from train.data.corpus import check_disjoint_contents, describe_store, tokenize_corpus
from train.data.documents import check_disjoint_files
from train.data.masking import Vocab
from train.data.stages import StagedDataset, split_stages, stage_seed
from train.data.token_store import TokenStore
from train.loop import checkpoint
from train.loop.atomic_dir import check_writable, report_full_disk
from train.loop.evaluate import evaluate, first_indices
from train.loop.flops import measure_peak_flops
from train.loop.launch import run_command, start_accelerator
from train.loop.memory import fit_micro_batch, plan
from train.loop.model_init import build_config, build_model, extend_max_positions
from train.loop.objective import LanguageModel
from train.loop.optim import NonFiniteGuard, adamw, learning_rate, set_learning_rate
from train.loop.preemption import (
    EXIT_CODES,
    STOP_REASONS,
    AsyncScalars,
    PreemptionHandler,
    end_workers,
    ignore_signals,
)
from train.loop.run_dir import CheckpointSaver, lock_run_dir, resume, save_model
from train.loop.run_log import RunLog, check_settings_unchanged, flat_settings
from train.settings import OptimSettings, PretrainSettings, RunSettings, require

DEFAULT_CONFIG = str(Path(__file__).parent.parent / "configs" / "pretrain" / "demo.yaml")


def main(settings: PretrainSettings) -> Path:
    """Pretrain, or go on where the run of that name stopped.

    Returns:
        The folder of the finished model, for `from_pretrained`.

    Raises:
        InputError: The settings do not fit together, the data, or the run that is there.
        SystemExit: A signal ended the run early; a checkpoint is there.
    """
    started = time.monotonic()
    roformer.use_for_auto_classes()
    transformers.utils.logging.disable_progress_bar()
    folder = Path(settings.run.folder) / settings.run.name
    accelerator = start_accelerator(settings.run.tracker, str(folder))
    precision = accelerator.mixed_precision
    check_writable(folder, "run.folder")
    check_writable(Path(settings.corpus.cache), "corpus.cache")
    check_settings_unchanged(folder, settings, precision)
    preemption = PreemptionHandler(started, settings.run.max_hours, is_compiled(accelerator))
    stages = split_stages(settings)
    for stage in stages:
        refuse_misfits(stage, accelerator)
    if settings.run.dry:
        dry_run(settings, stages, accelerator)
        return folder / "model"
    with report_full_disk(folder):
        tokenizer, stores, held_out = prepare_data(settings, stages, accelerator)
        config = build_config(settings.model, settings.corpus.length, tokenizer)
        extend_max_positions(config, max(stage.corpus.length for stage in stages))
        objective = make_objective(settings, config)
        steps = make_steps(stages, stores, tokenizer, objective, accelerator)
        with lock_run_dir(folder, accelerator):
            # it may have begun while this one waited
            check_settings_unchanged(folder, settings, precision)
            # TensorBoard takes the name for a folder, others for that of a project
            project = folder.resolve().parent.name
            name = "tracker" if settings.run.tracker == "tensorboard" else project
            accelerator.init_trackers(name, flat_settings(settings))
            code = train(settings, accelerator, objective, steps, held_out, folder, preemption)
            if code is None:
                fresh = settings.model.init is None
                save_model(objective, tokenizer, folder / "model", accelerator, fresh)
    accelerator.end_training()
    if code:
        raise SystemExit(code)
    return folder / "model"


def train(
    settings: PretrainSettings,
    accelerator: Accelerator,
    objective: LanguageModel,
    steps: StagedDataset,
    held_out: SequenceIndex,
    folder: Path,
    preemption: PreemptionHandler,
) -> int | None:
    """The loop: from the newest checkpoint, or from nothing, to the last step or the end of time.

    Returns:
        None when the run is finished; the exit code of the reason why it ended before.
    """
    optim, run, total = settings.optim, settings.run, steps.total
    rate = learning_rate(optim, total)
    optimizer = adamw(
        objective, optim.learning_rate, optim.weight_decay, optim.betas, optim.epsilon
    )
    model, optimizer = accelerator.prepare(objective, optimizer)
    text = [*(stage.sequences for stage in steps.stages), held_out]
    data = [sequences.store.folder.name for sequences in text]
    state = resume(settings, folder, objective, optimizer.optimizer, accelerator, data, total)
    peak = peak_flops(run, accelerator)
    fit(steps, model, objective, accelerator)
    hours, config = state["seconds"] / 3600, objective.model.config
    if total is None and hours >= (optim.hours or 0):
        return None  # its time was over when it was saved
    saver = CheckpointSaver(folder, objective, optimizer.optimizer, data, run.keep)
    with preemption, RunLog(accelerator, folder, state, total, config, peak) as journal:
        finite = NonFiniteGuard(optimizer, skipped(journal, steps), folder / "checkpoints")
        loader = make_loader(steps, state["step"], run.workers, accelerator.device)
        for step, micro_batches in enumerate(journal.clock.timed(loader), start=state["step"]):
            preemption.heartbeat()
            seed = stateless_rng.random_bits(run.seed, step, accelerator.process_index)
            torch.manual_seed(int(seed) >> 1)
            rate_now = rate(step, hours)
            set_learning_rate(optimizer, rate_now)
            predicted, told = all_reduce_step_info(micro_batches, preemption, journal, accelerator)
            for number, batch in enumerate(micro_batches, start=1):  # the last exchanges gradients
                with nullcontext() if number == len(micro_batches) else accelerator.no_sync(model):
                    loss, right = model(**to_device(batch, accelerator.device))
                    # data-parallel gradients are averages: undo it, for a sum over all processes
                    accelerator.backward(loss * accelerator.num_processes / predicted)
                journal.add(loss, right, batch)
                finite.record_loss(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), optim.clip_norm)
            norm = checkpoint.full_tensor(norm)
            finite.step(step, norm)
            done = step + 1
            seconds, *reasons = told.result()
            hours = seconds / 3600
            ended = done == total or (total is None and hours >= (optim.hours or 0))
            if done % run.log_every == 0 or ended:
                journal.training(done, rate_now, norm)
            if done % run.validate_every == 0 or ended:
                with journal.clock.paused():
                    scores = evaluate(
                        model,
                        held_out,
                        steps.vocab,
                        accelerator,
                        batch=held_out_batch(steps, held_out),
                        chosen=first_indices(held_out, run.validation_sequences),
                        heartbeat=preemption.heartbeat,
                    )
                journal.validation(done, scores)
            last = ended or any(reasons)
            if (done % run.save_every == 0 or last) and (finite.check_last_step() or last):
                with preemption.extend_timeout():  # a disk may be slow
                    saver.save(done, journal, last=last)
            if ended:
                return None
            if any(reasons):
                return leave(reasons, done, accelerator)
    return None


def refuse_misfits(settings: PretrainSettings, accelerator: Accelerator) -> None:
    """Say what does not fit before any work is done on the text.

    Raises:
        InputError: Model and length, batch and processes, a named file, or one in both parts.
    """
    config = build_config(settings.model, settings.corpus.length)
    with torch.device("meta"):  # an activation, kernel or head that does not exist is said here
        fresh = dataclasses.replace(settings.model, init=None)
        LanguageModel(build_model(fresh, config, settings.run.seed))
    optim = settings.optim
    check_batch_size(optim.batch_size, optim.micro_batch, accelerator.num_processes)
    check_disjoint_files(settings.corpus)


def prepare_data(
    settings: PretrainSettings, stages: list[PretrainSettings], accelerator: Accelerator
) -> tuple[PreTrainedTokenizerBase, list[TokenStore], SequenceIndex]:
    """Tokenizer, the text of each stage, held-out text; one process a machine does the work."""
    corpus = settings.corpus
    with accelerator.local_main_process_first():
        vocabulary.train_if_missing(stages[0].corpus)
        tokenizer = vocabulary.load_tokenizer(corpus.tokenizer)
        accelerator.print(f"vocabulary: the {len(tokenizer)} pieces of {corpus.tokenizer}")
        for stage in stages:
            build_config(stage.model, stage.corpus.length, tokenizer)
        stores = [tokenize_corpus(stage.corpus, "train", tokenizer) for stage in stages]
        held_out = tokenize_corpus(corpus, "validation", tokenizer)
    for store in stores:
        check_disjoint_contents(store, held_out)
        accelerator.print(describe_store("train", store))
    accelerator.print(describe_store("validation", held_out))
    return tokenizer, stores, SequenceIndex(held_out, corpus.length)


def make_objective(settings: PretrainSettings, config: PreTrainedConfig) -> LanguageModel:
    """The model of a configuration with its loss, in float32."""
    model = build_model(settings.model, config, settings.run.seed)
    if settings.model.gradient_checkpointing:
        # transformers renamed it after 5.17
        renamed = getattr(model, "activation_checkpointing_enable", None)
        (renamed or model.gradient_checkpointing_enable)()
    return LanguageModel(model)


def make_steps(
    stages: list[PretrainSettings],
    stores: list[TokenStore],
    tokenizer: PreTrainedTokenizerBase,
    objective: LanguageModel,
    accelerator: Accelerator,
) -> StagedDataset:
    """This process's share of every step.

    Raises:
        InputError: The warm-up would outlast the run.
    """
    compiled, parts = is_compiled(accelerator), []
    for number, (stage, store) in enumerate(zip(stages, stores)):
        corpus, optim = stage.corpus, stage.optim
        sequences = SequenceIndex(store, corpus.length, corpus.weights)
        rate = None if objective.causal else corpus.mask_rate
        most = max_predictions(optim.micro_batch * corpus.length, rate)
        steps = StepDataset(
            sequences,
            Vocab.from_tokenizer(tokenizer, corpus.whole_word),
            optim.batch_size,
            optim.micro_batch,
            rate,
            stage_seed(stage.run.seed, number),
            accelerator.num_processes,
            accelerator.process_index,
            packed=objective.packed,
            pad_predictions_to=most if compiled else None,
        )
        parts.append((number_of_steps(optim, sequences.mean_length), steps))
    whole = StagedDataset(parts)
    require_warmup(stages[0].optim.warmup_steps, whole.total)
    return whole


def require_warmup(steps: int, total: int | None) -> None:
    """Refuse a warm-up that would outlast the run; None is a run that ends by the clock.

    Raises:
        InputError: It would.
    """
    rule, remedy = f"must be fewer than the {total} steps of the run", "shorten it or train longer"
    require(total is None or steps < total, "optim.warmup_steps", rule, steps, remedy)


def is_compiled(accelerator: Accelerator) -> bool:
    """Whether Accelerate has been asked to compile the model."""
    return accelerator.state.dynamo_plugin.backend != DynamoBackend.NO


def number_of_steps(optim: OptimSettings, mean_length: float) -> int | None:
    """Optimiser steps: as given, as many as the token budget holds, or None for a time."""
    if optim.tokens is None:
        return optim.steps
    return math.ceil(optim.tokens / (optim.batch_size * mean_length))


def dry_run(
    settings: PretrainSettings, stages: list[PretrainSettings], accelerator: Accelerator
) -> None:
    """Print what the run would take, and write nothing.

    Raises:
        InputError: There is no tokenizer, and none would be learned.
    """
    corpus, model, tokenizer = settings.corpus, settings.model, None
    if corpus.vocabulary_size is None or Path(corpus.tokenizer).exists():
        tokenizer = vocabulary.load_tokenizer(corpus.tokenizer)
    else:  # not learned yet: as large as it may become
        sizes = {"vocab_size": corpus.vocabulary_size} | model.config
        model = dataclasses.replace(model, config=sizes)
    config = build_config(model, corpus.length, tokenizer)
    fresh = dataclasses.replace(model, init=None)  # of the same sizes, and nothing is loaded
    objective = make_objective(dataclasses.replace(settings, model=fresh), config)
    steps = [number_of_steps(stage.optim, stage.corpus.length) for stage in stages]
    known = [number for number in steps if number is not None]
    require_warmup(settings.optim.warmup_steps, sum(known) if known == steps else None)
    plan(settings, stages, objective.to(accelerator.device), steps, accelerator)


def fit(
    steps: StagedDataset, model: nn.Module, objective: LanguageModel, accelerator: Accelerator
) -> None:
    """Make micro-batches smaller where they would not fit; what was tried is no peak of the run."""
    for part in steps.stages:
        length = part.sequences.length
        part.micro_batch = fit_micro_batch(
            model, objective, length, part.micro_batch, part.mask_rate, accelerator
        )
        if (
            part.pad_predictions_to is not None
        ):  # or smaller micro-batches would predict as many as before
            part.pad_predictions_to = max_predictions(part.micro_batch * length, part.mask_rate)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def held_out_batch(steps: StagedDataset, held_out: SequenceIndex) -> int:
    """Held-out sequences of a forward pass: as many tokens as every micro-batch holds."""
    tokens = min(part.micro_batch * part.sequences.length for part in steps.stages)
    return max(1, tokens // held_out.length)


def make_loader(steps: StagedDataset, start: int, workers: int, device: torch.device) -> DataLoader:
    """The steps from `start` on, made ahead of time by `workers` processes for the device."""
    end = sys.maxsize if steps.total is None else steps.total
    quiet = ignore_signals if workers else None
    if workers:
        atexit.register(end_workers)  # before multiprocessing's own, which was registered earlier
        open_many_files()
    return DataLoader(
        steps,
        batch_size=None,
        sampler=range(start, end),
        num_workers=workers,
        worker_init_fn=quiet,
        pin_memory=device.type == "cuda",  # from other memory no copy is made without waiting
    )


def open_many_files() -> None:
    """Allow this process as many open files as it may have: each tensor of a worker is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS calls its own limit unlimited, and refuses that
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def all_reduce_step_info(
    micro_batches: list[dict[str, Any]],
    preemption: PreemptionHandler,
    journal: RunLog,
    accelerator: Accelerator,
) -> tuple[Tensor, AsyncScalars]:
    """What all processes must know of a step: one sum over them.

    Returns:
        Predicted tokens of the step, at least 1, on the device; and for the host seconds of the run
        and how many processes have heard each reason to end it.
    """
    predicted = sum(int((batch["labels"] >= 0).sum()) for batch in micro_batches)
    seconds = journal.clock.seconds if accelerator.is_main_process else 0.0
    values = [predicted, seconds, *preemption.stop_requests()]
    device = accelerator.device
    told = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
    sums = accelerator.reduce(told.to(device, non_blocking=True))
    return sums[0].clamp(min=1), AsyncScalars(sums[1:])


def skipped(journal: RunLog, steps: StagedDataset) -> Callable[[int, int, Tensor], None]:
    """What to do about a step whose gradient was not finite: name it and its sequences."""

    def report(step: int, in_a_row: int, lost: Tensor) -> None:
        # all processes are here, for they saw the same norm; a step without one tells nothing
        found = journal.accelerator.gather(lost.long()[None])  # [processes, micro-batches]
        journal.warn(
            f"step {step + 1} changed no weight, its gradient is not finite ({in_a_row} in a row); "
            + blame(steps, step, found)
        )

    return report


def blame(steps: StagedDataset, step: int, lost: Tensor) -> str:
    """Where the loss of a step was not finite, in at most eight numbers of sequences.

    Args:
        steps: Of the run.
        step: From 0.
        lost: [processes, micro-batches], not 0 where the loss was not finite.
    """
    found = lost.nonzero().tolist()
    places = found or [[rank, 0] for rank in range(len(lost))]
    shown, words = places[:4], []
    for rank, micro_batch in shown:
        numbers = steps.sequences(step, rank, micro_batch)
        some = numbers[: 8 // len(shown)]
        more = ", ..." if some != numbers else ""
        words.append(f"sequences {', '.join(map(str, some))}{more} of process {rank}")
    words += ["others"] * (len(places) > len(shown))
    start = "its loss is not finite in" if found else "its loss is finite everywhere, with"
    return f"{start} {' and '.join(words)}"


def leave(reasons: list[float], step: int, accelerator: Accelerator) -> int:
    """Say why a run ends early; what the process ends with."""
    number = next(i for i, heard in enumerate(reasons) if heard)
    accelerator.print(f"{STOP_REASONS[number]}: saved after step {step}; the same command goes on")
    return EXIT_CODES[number]


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch on the device, copied without waiting; plain numbers stay."""
    return send_to_device(batch, device, non_blocking=True)


def peak_flops(run: RunSettings, accelerator: Accelerator) -> float:
    """Operations a second of one device: as given, or of a large product in the run's precision."""
    if run.peak_tflops is not None:
        return run.peak_tflops * 1e12
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return measure_peak_flops(
        accelerator.device, half.get(accelerator.mixed_precision, torch.float32)
    )


if __name__ == "__main__":
    run_command(main, PretrainSettings, default_config=DEFAULT_CONFIG)
