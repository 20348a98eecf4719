"""Pretrain an encoder (masked tokens) or a decoder (next tokens).

    accelerate launch --quiet --config_file configs/accelerate/cpu.yaml train/pretrain.py

Without arguments it trains the demo's RoFormer on the documentation installed on this machine.
`main` prepares model, data and run folder; `train` is the training loop.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader
from transformers import PreTrainedTokenizerBase

from train.atomic_dir import check_writable, report_full_disk
from train.command_line import run_command
from train.data import vocabulary
from train.data.batching import BatchFormat, SequenceIndex, StepDataset, check_batch_size
from train.data.corpus import describe_stores, tokenize_corpus
from train.data.documents import check_text_files
from train.data.stateless_rng import derive_seed
from train.data.vocabulary import Vocab
from train.loop.checkpoint import Checkpoints, full_tensor, lock_run_dir, save_model
from train.loop.evaluate import evaluate
from train.loop.language_model import (
    LanguageModel,
    build_config,
    build_language_model,
    check_model,
    extend_max_positions,
)
from train.loop.launch import any_process, compute_dtype, is_compiled, start_accelerator
from train.loop.memory import dry_run, fit_micro_batches
from train.loop.optim import (
    AsyncScalars,
    NonFiniteGuard,
    build_optimizer,
    count_steps,
    learning_rate_schedule,
    set_learning_rate,
)
from train.loop.preemption import STOP_REASONS, PreemptionHandler, announce_stop
from train.loop.run_log import RunLog, measure_peak_flops
from train.loop.run_metadata import check_changed_settings, flat_settings
from train.settings import (
    CorpusSettings,
    InputError,
    PretrainSettings,
    check_warmup,
    name_stage,
    split_stages,
)

DEFAULT_CONFIG = str(Path(__file__).parent.parent / "configs" / "pretrain" / "demo.yaml")


def main(settings: PretrainSettings) -> Path:
    """Pretrain a model, or resume the run of the same name.

    Returns:
        The folder of the model, for `from_pretrained`. It is written when the run is finished: not
        by a dry run, nor by a launch that `run.max_hours` ended.

    Raises:
        InputError: Settings or data cannot be used, or do not belong to the run that exists.
        SystemExit: A signal stopped the run, after a checkpoint was saved.
    """
    started = time.monotonic()
    corpus, run, stages = settings.corpus, settings.run, split_stages(settings)
    folder = Path(run.folder) / run.name
    accelerator = start_accelerator(run.tracker, str(folder))
    # flex_attention compiles itself; a first step that compiles takes minutes
    compiled = is_compiled(accelerator) or settings.model.attention == "flex_attention"
    preemption = PreemptionHandler(started, run.max_hours, accelerator.num_processes, compiled)
    check_run(settings, stages, folder, accelerator)
    if run.dry:
        dry_run(settings, stages, accelerator)
        return folder / "model"
    with report_full_disk(folder):
        tokenizer, training, held_out = prepare_data(corpus, stages, accelerator)
        config = build_config(settings.model, corpus.length, tokenizer)
        extend_max_positions(config, max(stage.corpus.length for stage in stages))
        language_model = build_language_model(settings.model, config, run.seed)
        accelerator.print(f"model: {language_model.description}")
        language_model.choose_attention(accelerator)  # which decides the layout of the batches
        datasets = build_datasets(stages, training, tokenizer, language_model, accelerator)
        # a budget of tokens becomes steps only after tokenizing
        check_warmup(settings.optim.warmup_steps, sum(map(len, datasets)))
        with lock_run_dir(folder, accelerator):
            # the name is a folder to TensorBoard, and a project to other trackers
            project = "tracker" if run.tracker == "tensorboard" else folder.resolve().parent.name
            accelerator.init_trackers(project, flat_settings(settings))
            stop_reason = train(
                settings, accelerator, language_model, datasets, held_out, folder, preemption
            )
            # a run that was finished earlier keeps its model, which may have been edited
            model_exists = accelerator.is_main_process and (folder / "model").exists()
            if stop_reason is None and not any_process(model_exists, accelerator):
                is_new = settings.model.init is None
                save_model(
                    language_model, tokenizer, folder / "model", accelerator, copy_token_type=is_new
                )
    accelerator.end_training()
    exit_code = STOP_REASONS[stop_reason] if stop_reason else 0
    if exit_code:
        raise SystemExit(exit_code)
    return folder / "model"


def check_run(
    settings: PretrainSettings,
    stages: list[PretrainSettings],
    folder: Path,
    accelerator: Accelerator,
) -> None:
    """Check what can be known before any work on the text."""
    corpus = settings.corpus
    check_writable(folder, "run.folder")
    check_writable(Path(corpus.cache), "corpus.cache")
    # and again under the lock, in `Checkpoints.resume`: until then another launch may begin the run
    check_changed_settings(folder, settings, accelerator.mixed_precision)
    if settings.model.attention == "flex_attention" and accelerator.device.type == "cpu":
        raise InputError(
            "model.attention must have a backward pass on a CPU, got flex_attention; take sdpa"
        )
    # held-out text is read at corpus.length, whatever the stages have
    check_model(settings.model, corpus.length)
    if settings.model.init is None and "hidden_size" not in settings.model.config:
        remedy = "its type's default sizes; name a file of configs/model/ with --config"
        accelerator.print(f"warning: no model.config.hidden_size, so the model has {remedy}")
    for index, stage in enumerate(stages):
        with name_stage(index if settings.stages else None):
            check_model(stage.model, stage.corpus.length)
            optim = stage.optim
            check_batch_size(optim.batch_size, optim.micro_batch, accelerator.num_processes)
            check_text_files(stage.corpus)


def train(
    settings: PretrainSettings,
    accelerator: Accelerator,
    language_model: LanguageModel,
    datasets: list[StepDataset],
    held_out: SequenceIndex,
    folder: Path,
    preemption: PreemptionHandler,
) -> str | None:
    """Train from the newest checkpoint, or from the beginning, until the end or a stop request.

    The `datasets` are those of the stages, one after the other.

    Returns:
        None when the run is finished, else one of `STOP_REASONS`.
    """
    steps_of_run: ConcatDataset = ConcatDataset(datasets)  # an item is all batches of a step
    optim, run, total = settings.optim, settings.run, len(steps_of_run)
    learning_rate = learning_rate_schedule(optim, total)
    optimizer = build_optimizer(language_model, optim)
    model, optimizer = accelerator.prepare(language_model, optimizer)
    stores = [*(dataset.sequences.store for dataset in datasets), held_out.store]
    # unwrapped: its parameters are those of `model`, under the names without a wrapper's prefix
    checkpoints = Checkpoints(
        settings, folder, language_model, optimizer.optimizer, accelerator, stores
    )
    state = checkpoints.resume(total)
    if state["step"] == total:
        return None
    peak = (
        measure_peak_flops(accelerator.device, compute_dtype(accelerator))
        if run.peak_tflops is None
        else run.peak_tflops * 1e12
    )
    fit_micro_batches(datasets, model, bool(optimizer.state), accelerator)  # changes them
    validate = prepare_validation(model, held_out, datasets, run.validation_sequences, accelerator)
    with (
        preemption,
        RunLog(accelerator, folder, state, total, language_model.model.config, peak) as log,
    ):
        guard = NonFiniteGuard(optimizer, log.warn, folder / "checkpoints")
        save_is_due = False
        is_cuda = accelerator.device.type == "cuda"  # pinned memory: for non-blocking copies
        steps = range(state["step"], total)
        # without workers: a process makes batches faster than a GPU needs them
        loader = DataLoader(steps_of_run, batch_size=None, sampler=steps, pin_memory=is_cuda)
        for step, micro_batches in enumerate(log.clock.time_batches(loader), state["step"]):
            preemption.start_step(is_new_stage=step in steps_of_run.cumulative_sizes)
            # dropout is a function of seed, step and process
            torch.manual_seed(derive_seed(run.seed, step, accelerator.process_index))
            set_learning_rate(optimizer, learning_rate(step))
            labelled, stop_counts = all_reduce_step_info(micro_batches, preemption, accelerator)
            for i, batch in enumerate(micro_batches, start=1):
                # gradients are reduced over processes with the last micro-batch
                with nullcontext() if i == len(micro_batches) else accelerator.no_sync(model):
                    inputs = send_to_device(batch, accelerator.device, non_blocking=True)
                    loss, _ = model(**inputs)  # LanguageModel.forward: this process's sum
                    # DDP averages this: the mean over the labelled tokens of all processes
                    accelerator.backward(loss * accelerator.num_processes / labelled)
                log.add(loss, batch)
            norm = full_tensor(accelerator.clip_grad_norm_(model.parameters(), optim.clip_norm))
            guard.optimizer_step(step, norm)  # skipped unless finite; and zero_grad()
            done = step + 1
            counts = stop_counts.wait()
            finished = done == total
            is_last = finished or any(counts)  # the last step of this launch
            if done % run.log_every == 0 or finished:
                log.report_training(done, learning_rate(step), norm)
            if done % run.validate_every == 0 or finished:
                with log.clock.paused():
                    scores = validate(heartbeat=preemption.heartbeat)
                log.report_validation(done, scores)
            save_is_due |= done % run.save_every == 0
            if save_is_due or is_last:
                may_save = guard.check_last_step()  # ends a run whose gradients stay non-finite
                save_is_due = not may_save  # else after the next step
                if may_save or is_last:
                    with preemption.extend_timeout():
                        checkpoints.save(done, log, is_last)
            if is_last and not finished:
                return announce_stop(counts, done, accelerator)
    return None


def prepare_validation(
    model: nn.Module,
    held_out: SequenceIndex,
    datasets: list[StepDataset],
    limit: int,
    accelerator: Accelerator,
) -> Callable[..., dict[str, float]]:
    """Return `evaluate` for the first `limit` held-out sequences; it takes `heartbeat` alone."""
    # no more tokens than the smallest micro-batch, which fits into memory
    tokens = min(dataset.micro_batch * dataset.sequences.length for dataset in datasets)
    return partial(
        evaluate,
        model,
        held_out,
        datasets[0].batch_format.vocab,
        accelerator,
        batch_size=max(1, tokens // held_out.length),
        sequence_ids=np.arange(len(held_out))[:limit],
    )


def all_reduce_step_info(
    micro_batches: list[dict[str, Any]],
    preemption: PreemptionHandler,
    accelerator: Accelerator,
) -> tuple[Tensor, AsyncScalars]:
    """Reduce over processes what all of them have to know of a step, in one collective call.

    Returns the number of labelled tokens of the step, at least 1, on the device; and the number of
    requests for each stop reason, for the host.
    """
    labelled = sum(int((batch["labels"] >= 0).sum()) for batch in micro_batches)
    values = [labelled, *preemption.stop_requests()]
    device = accelerator.device
    info = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
    sums = accelerator.reduce(info.to(device, non_blocking=True))
    return sums[0].clamp(min=1), AsyncScalars(sums[1:])


def prepare_data(
    corpus: CorpusSettings, stages: list[PretrainSettings], accelerator: Accelerator
) -> tuple[PreTrainedTokenizerBase, list[SequenceIndex], SequenceIndex]:
    """Return tokenizer, training sequences of each stage, and held-out sequences.

    One process per machine trains the vocabulary and tokenizes the text where needed.
    """
    with accelerator.local_main_process_first():
        name = vocabulary.train_if_missing(stages[0].corpus)
        tokenizer = vocabulary.load_tokenizer(name)
        accelerator.print(f"vocabulary: the {len(tokenizer)} pieces of {name}")
        # a vocabulary that does not fit model or masks is refused before any text is tokenized
        build_config(stages[0].model, stages[0].corpus.length, tokenizer)
        Vocab.from_tokenizer(tokenizer).check_whole_word(corpus.whole_word)
        stores = [tokenize_corpus(stage.corpus, "train", tokenizer) for stage in stages]
        held_out = tokenize_corpus(corpus, "validation", tokenizer)
    texts = dict.fromkeys(str(stage.corpus.train) for stage in stages)
    accelerator.print(f"text: {', '.join(texts)}; held out: {corpus.validation}")
    distinct = {store.name: store for store in stores}  # stages may share a text
    accelerator.print(*describe_stores([*distinct.values()], held_out), sep="\n")
    training = [SequenceIndex(store, stage.corpus.length) for stage, store in zip(stages, stores)]
    return tokenizer, training, SequenceIndex(held_out, corpus.length)


def build_datasets(
    stages: list[PretrainSettings],
    training: list[SequenceIndex],
    tokenizer: PreTrainedTokenizerBase,
    language_model: LanguageModel,
    accelerator: Accelerator,
) -> list[StepDataset]:
    """Build this process's micro-batches of all stages."""
    processes, rank = accelerator.num_processes, accelerator.process_index
    vocab, datasets = Vocab.from_tokenizer(tokenizer), []
    for index, (stage, sequences) in enumerate(zip(stages, training)):
        corpus, optim, seed = stage.corpus, stage.optim, stage.run.seed
        # stages on the same text differ in order and masks
        stage_seed = seed if index == 0 else derive_seed(seed, index)
        batch_format = BatchFormat(
            vocab=vocab,
            mask_rate=corpus.mask_rate,
            seed=stage_seed,
            causal=language_model.causal,
            whole_word=corpus.whole_word,
            packed=language_model.packed,
            constant_shapes=is_compiled(accelerator),
        )
        steps = count_steps(optim, sequences.mean_length)
        dataset = StepDataset(
            sequences, batch_format, steps, optim.batch_size, optim.micro_batch, processes, rank
        )
        datasets.append(dataset)
    return datasets


if __name__ == "__main__":
    run_command(main, PretrainSettings, default_config=DEFAULT_CONFIG)
