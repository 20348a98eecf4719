"""Pretrain an encoder with masked language modelling: `accelerate launch train/pretrain.py`.

Without arguments it trains the demo's RoFormer on the documentation installed on this machine.
Read `main`, then `train`: that is the whole run.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

import roformer
from train import checkpoint, counter, vocabulary
from train.corpus import EMBEDDED, TokenStore, find_files, tokenise
from train.initialise import build, model_config
from train.journal import Journal, environment
from train.launch import run_command, start_accelerator
from train.objective import MaskedLanguageModel
from train.optim import adamw, rate_factor, set_rate
from train.packing import Sequences, SpecialTokens, Steps, require_shares
from train.settings import PretrainSettings, require
from train.validate import evaluate

DEFAULT_CONFIG = str(Path(__file__).parent.parent / "configs" / "pretrain" / "demo.yaml")

FREE = {
    "corpus": {"cache", "train", "validation", "tokenizer"},  # what they hold is compared instead
    "run": {
        "folder", "log_every", "validate_every", "validation_sequences", "save_every", "keep",
        "tracker",
    },
}  # fmt: skip
"""Keys that may change when a run goes on: they do not decide what is learned."""


def main(settings: PretrainSettings) -> Path:
    """Pretrain, or go on where the run of that name stopped.

    Returns:
        The folder of the finished model, for `from_pretrained`.

    Raises:
        InputError: The settings do not fit together, the data, or the run that is there.
    """
    roformer.use_for_auto_classes()
    transformers.utils.logging.disable_progress_bar()
    folder = Path(settings.run.folder) / settings.run.name
    refuse_other_settings(folder, settings)
    accelerator = start_accelerator(settings.run.tracker, str(folder))
    refuse_misfits(settings, accelerator)
    tokenizer, stores = prepare_data(settings, accelerator)
    config = model_config(settings.model, settings.corpus.length, tokenizer)
    objective = MaskedLanguageModel(build(settings.model, config, settings.run.seed))
    steps = make_steps(settings, stores[0], tokenizer, accelerator)
    held_out = Sequences(stores[1], settings.corpus.length)
    total = number_of_steps(settings, steps.sequences)
    if accelerator.is_main_process:
        write_header(folder, settings, accelerator)
    accelerator.init_trackers("tracker")
    train(settings, accelerator, objective, steps, total, held_out, folder)
    if accelerator.is_main_process:
        objective.model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        print(f"model and tokenizer: {folder / 'model'}")
    accelerator.end_training()
    return folder / "model"


def train(
    settings: PretrainSettings,
    accelerator: Accelerator,
    objective: MaskedLanguageModel,
    steps: Steps,
    total: int,
    held_out: Sequences,
    folder: Path,
) -> None:
    """The loop: from the newest checkpoint, or from nothing, to step number `total`."""
    optim, run = settings.optim, settings.run
    rate = rate_factor(optim.schedule, optim.warmup_steps, total + 1)  # the last step still moves
    optimizer = adamw(
        objective, optim.learning_rate, optim.weight_decay, optim.betas, optim.epsilon
    )
    data = [part.store.folder.name for part in (steps.sequences, held_out)]
    state = resume(folder, objective, optimizer, accelerator, data)
    model, optimizer = accelerator.prepare(objective, optimizer)
    loader = DataLoader(steps, batch_size=None, sampler=range(state["step"], total))
    with Journal(accelerator, folder, state, total) as journal:
        for step, micro_batches in enumerate(loader, start=state["step"]):
            torch.manual_seed(int(counter.bits(run.seed, step, accelerator.process_index)) >> 1)
            set_rate(optimizer, optim.learning_rate * rate(step + 1))
            predicted = accelerator.reduce(count_targets(micro_batches, accelerator.device))
            for batch, last in with_last(micro_batches):
                with nullcontext() if last else accelerator.no_sync(model):
                    loss, right = model(**to_device(batch, accelerator.device))
                    # data-parallel gradients are averages: undo it, for a sum over all processes
                    accelerator.backward(loss * accelerator.num_processes / predicted.clamp(min=1))
                journal.add(loss, right, batch)
            norm = accelerator.clip_grad_norm_(model.parameters(), optim.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            done = step + 1
            if done % run.log_every == 0 or done == total:
                journal.training(done, optim.learning_rate * rate(step + 1), norm)
            if done % run.validate_every == 0 or done == total:
                limit = run.validation_sequences
                scores = evaluate(
                    model, held_out, steps.special, accelerator, optim.micro_batch, limit
                )
                journal.validation(done, scores)
            if done % run.save_every == 0 or done == total:
                save(folder, done, objective, optimizer, accelerator, journal, data, run.keep)


def refuse_misfits(settings: PretrainSettings, accelerator: Accelerator) -> None:
    """Say what does not fit before any work is done on the text.

    Raises:
        InputError: Model and length, batch and processes, or a named file.
    """
    config = model_config(settings.model, settings.corpus.length)
    with torch.device("meta"):  # an activation, kernel or head that does not exist is said here
        fresh = dataclasses.replace(settings.model, init=None)
        MaskedLanguageModel(build(fresh, config, settings.run.seed))
    optim = settings.optim
    require_shares(optim.batch_size, optim.micro_batch, accelerator.num_processes)
    for part in ("train", "validation"):
        if getattr(settings.corpus, part) != EMBEDDED:  # which is made, not found
            find_files(settings.corpus, part)


def prepare_data(
    settings: PretrainSettings, accelerator: Accelerator
) -> tuple[PreTrainedTokenizerBase, tuple[TokenStore, TokenStore]]:
    """Tokenizer, and training and held-out text as ids; one process a machine does the work."""
    corpus = settings.corpus
    with accelerator.local_main_process_first():
        vocabulary.learn_if_missing(corpus)
        tokenizer = vocabulary.load(corpus.tokenizer)
        model_config(settings.model, corpus.length, tokenizer)
        stores = tokenise(corpus, "train", tokenizer), tokenise(corpus, "validation", tokenizer)
    return tokenizer, stores


def make_steps(
    settings: PretrainSettings,
    store: TokenStore,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
) -> Steps:
    """This process's share of every step."""
    return Steps(
        Sequences(store, settings.corpus.length),
        SpecialTokens.of(tokenizer),
        settings.optim.batch_size,
        settings.optim.micro_batch,
        settings.corpus.mask_rate,
        settings.run.seed,
        accelerator.num_processes,
        accelerator.process_index,
    )


def number_of_steps(settings: PretrainSettings, sequences: Sequences) -> int:
    """Optimiser steps of the run: as given, or as many as the token budget holds.

    Raises:
        InputError: The warm-up would outlast them.
    """
    optim, steps = settings.optim, settings.optim.steps
    if steps is None:
        assert optim.tokens is not None
        steps = math.ceil(optim.tokens / (optim.batch_size * sequences.mean_length))
    rule, found = f"must be fewer than the {steps} steps of the run", optim.warmup_steps
    require(found < steps, "optim.warmup_steps", rule, found, "shorten it or train longer")
    return steps


def count_targets(micro_batches: list[dict[str, Tensor]], device: torch.device) -> Tensor:
    """Predicted tokens of this process in one step."""
    return torch.tensor(sum(len(batch["targets"]) for batch in micro_batches), device=device)


def with_last(batches: list[dict[str, Tensor]]) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Each micro-batch, and whether it closes the step: only then are gradients exchanged."""
    for number, batch in enumerate(batches, start=1):
        yield batch, number == len(batches)


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch on the device, copied without waiting."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def resume(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    data: list[str],
) -> dict[str, Any]:
    """Load the newest complete checkpoint, if there is one; says where the run goes on.

    Raises:
        InputError: The text or vocabulary is not what the run began with, the checkpoint is another
            model's, or machines hold different ones.
    """
    with accelerator.main_process_first():  # which sets damaged ones aside
        path = checkpoint.newest(folder)
    state = {"step": 0, "tokens": 0, "seconds": 0.0, "pending": [0.0] * 4, "data": data}
    if path is not None:
        state = checkpoint.load(path, model, optimizer)
        accelerator.print(f"going on after step {state['step']}")
    same, rule = state["data"] == data, f"must give the tokens {state['data']} the run began with"
    require(same, "corpus.train and corpus.validation", rule, data, "choose another run.name")
    steps = accelerator.gather(torch.tensor([state["step"]], device=accelerator.device))
    found, rule = steps.unique().tolist(), "must hold one checkpoint for all machines"
    require(len(found) == 1, "run.folder", rule, f"steps {found}", "put it on a shared disk")
    return state


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    journal: Journal,
    data: list[str],
    keep: int,
) -> None:
    """Write a checkpoint on the main process and delete the oldest."""
    state = journal.state() | {"data": data}
    if accelerator.is_main_process:
        checkpoint.save(folder, step, model, optimizer, state)
        checkpoint.retain(folder, keep)
    accelerator.wait_for_everyone()


def as_dict(settings: PretrainSettings) -> dict[str, Any]:
    """Settings as plain values, as settings.yaml holds them."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def refuse_other_settings(folder: Path, settings: PretrainSettings) -> None:
    """Stop a run from going on under other settings than it began with.

    Raises:
        InputError: A key that decides what is learned has changed.
    """
    file = folder / "settings.yaml"
    if not file.exists():
        return
    try:
        before = yaml.safe_load(file.read_text(encoding="utf-8"))
    except ValueError:
        before = None
    readable = isinstance(before, dict)
    require(
        readable, str(file), "must hold the settings of the run", "none", "choose another run.name"
    )
    for section, values in as_dict(settings).items():
        for key, value in values.items():
            begun = before.get(section, {}).get(key)
            rule = f"must stay {begun!r} for the run in {folder}"
            same = begun == value or key in FREE.get(section, ())
            require(same, f"{section}.{key}", rule, repr(value), "choose another run.name")


def write_header(folder: Path, settings: PretrainSettings, accelerator: Accelerator) -> None:
    """Write environment.json and settings.yaml, when a run begins."""
    if (folder / "settings.yaml").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps(environment(accelerator), indent=2) + "\n")
    unfinished = folder / "settings.yaml.tmp"
    unfinished.write_text(yaml.safe_dump(as_dict(settings), sort_keys=False), encoding="utf-8")
    unfinished.replace(folder / "settings.yaml")


if __name__ == "__main__":
    run_command(main, PretrainSettings, default_config=DEFAULT_CONFIG)
