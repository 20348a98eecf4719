"""The folder of a run, used by all processes of a launch together: lock, resume, save.

Files are touched by the main process; whether it succeeded is reduced over all processes, so that
all of them continue or stop together. `train.loop.checkpoint` lists the files.
"""

import fcntl
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedTokenizerBase

from train.atomic_dir import write_dir_atomically
from train.loop import checkpoint
from train.loop.objective import LanguageModel
from train.loop.run_log import INITIAL_STATE, RunLog
from train.loop.run_metadata import changed_settings, write_metadata
from train.settings import InputError, PretrainSettings, require

LOCK_TIMEOUT = 60.0
"""Seconds a launch waits for another of the same run, which may be about to save and exit."""


@contextmanager
def lock_run_dir(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Lock the run's folder for this launch; a collective call.

    Raises:
        InputError: Another launch still holds the lock after `LOCK_TIMEOUT`.
    """
    with ExitStack() as stack:
        error = ""
        if accelerator.is_main_process:
            try:
                stack.enter_context(lock_dir(folder))
            except InputError as refused:
                error = str(refused)
        if any_process(bool(error), accelerator):
            raise InputError(error or "run.folder must be free, got one in use; see process 0")
        yield


@contextmanager
def lock_dir(folder: Path) -> Iterator[None]:
    """Lock a run's folder for this process; the kernel unlocks it however the process ends.

    fcntl's locks are not inherited by forked data workers, which may outlive a killed process;
    flock's are.

    Raises:
        InputError: Another process still holds the lock after `LOCK_TIMEOUT`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as stream:
        started, waiting = time.monotonic(), False
        while not _try_lock(stream):
            stream.seek(0)
            found = f"{folder} in use by {stream.read() or 'another process'}"
            in_time = time.monotonic() - started <= LOCK_TIMEOUT
            remedy = "end it, or choose another run.name"
            require(in_time, "run.folder", "must be free", found, remedy)
            if not waiting:
                print(f"waiting up to {LOCK_TIMEOUT:.0f} s: {found}", flush=True)
            waiting = True
            time.sleep(0.2)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {platform.node()}")
        stream.flush()
        yield


def _try_lock(stream: TextIO) -> bool:
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:  # a file system without locks, such as Lustre by default
        print(f"warning: no lock on {stream.name}: {error.strerror}; start a run only once")
    return True


def any_process(condition: bool, accelerator: Accelerator) -> bool:
    """Return whether the condition holds on any process; a collective call."""
    value = torch.tensor(float(condition), device=accelerator.device)
    return bool(accelerator.reduce(value).item())


def resume(
    settings: PretrainSettings,
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    data: list[str],
    total: int | None,
) -> dict[str, Any]:
    """Load the newest intact checkpoint, if any, and write the run's metadata.

    The metadata is written last, so that a launch that cannot continue changes nothing. The model
    of a run that was finished earlier and now continues to `total` steps is removed.

    Args:
        settings: Settings of this launch.
        folder: The run's folder.
        model: The model.
        optimizer: Its optimizer.
        accelerator: The accelerator.
        data: Names of the token stores, which are hashes of text and tokenizer.
        total: Steps of the run, or None.

    Returns:
        `step`, `data` and `RunLog.state` to continue from.

    Raises:
        InputError: Text or vocabulary differ from those at the beginning of the run, the checkpoint
            belongs to another model or is from a step beyond `total`, or machines see different
            checkpoints.
    """
    with accelerator.main_process_first():  # it renames damaged checkpoints
        path = checkpoint.latest(folder)
    state = INITIAL_STATE | {"step": 0, "data": data}
    if path is not None:
        state |= checkpoint.load(path, model, optimizer)
        accelerator.print(f"going on after step {state['step']}")
    trained, remedy = state["step"], "train longer, or choose another run.name"
    rule = f"must be a budget of at least the {trained} steps that the run has trained"
    require(total is None or trained <= total, "optim", rule, f"{total} steps", remedy)
    same_data = state["data"] == data
    keys = "corpus.tokenizer, corpus.train and corpus.validation"
    rule = f"must give the tokens {state['data']} the run began with"
    remedy = "choose another run.name, or set run.allow_drift true"
    require(same_data or settings.run.allow_drift, keys, rule, data, remedy)
    steps = accelerator.gather(torch.tensor([state["step"]], device=accelerator.device))
    found, rule = steps.unique().tolist(), "must hold one checkpoint for all machines"
    require(len(found) == 1, "run.folder", rule, f"steps {found}", "put it on a shared disk")
    if accelerator.is_main_process:
        changed = changed_settings(folder, settings, accelerator.mixed_precision)
        if not same_data:
            changed[f"the tokens of {keys}"] = state["data"], data
        parameters = sum(parameter.numel() for parameter in model.parameters())
        write_metadata(folder, settings, accelerator, state["step"], parameters, changed)
        if state["step"] != total:
            shutil.rmtree(folder / "model", ignore_errors=True)
    return state


@dataclass
class CheckpointSaver:
    """Saves checkpoints of a run and deletes old ones, on the main process.

    Attributes:
        folder: The run's folder.
        model: The model.
        optimizer: Its optimizer.
        data: Names of the token stores.
        keep: Number of checkpoints to keep.
    """

    folder: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: list[str]
    keep: int

    def save(self, step: int, run_log: RunLog, last: bool) -> None:
        """Save a checkpoint; a collective call. A failure is a warning unless it is the last one.

        Raises:
            InputError: The last checkpoint could not be written.
        """
        accelerator, error = run_log.accelerator, ""
        state = run_log.state(step) | {"data": self.data}
        tensors = checkpoint.gather_state(
            self.model, self.optimizer, keep=accelerator.is_main_process
        )
        if accelerator.is_main_process:
            try:
                checkpoint.save(self.folder, step, tensors, state)
                checkpoint.prune(self.folder, self.keep)
            except OSError as failure:
                error = str(failure)
                run_log.warn(f"no checkpoint after step {step}, the one before stays: {error}")
        if any_process(bool(error), accelerator) and last:
            raise InputError(
                f"run.folder must have room for a checkpoint, got {error or 'none'}; make some, "
                "the same command goes on"
            )


def save_model(
    language_model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    accelerator: Accelerator,
    copy_token_type: bool,
) -> None:
    """Write the finished model and its tokenizer; a collective call.

    Args:
        language_model: The model.
        tokenizer: The run's tokenizer; its `model_max_length` becomes the model's.
        folder: Folder to write, replaced atomically.
        accelerator: The accelerator.
        copy_token_type: Give every token type the embedding of type 0, the only one that
            pretraining trains. With its random initial values, a second segment would be
            unreadable (12 % instead of 44 % masked accuracy for the models of results/pair).

    Raises:
        InputError: They could not be written; an earlier model stays.
    """
    weights = checkpoint.gather_weights(language_model.model, keep=accelerator.is_main_process)
    error = ""
    if accelerator.is_main_process:
        for name, table in weights.items():
            if copy_token_type and name.endswith("token_type_embeddings.weight"):
                weights[name] = table[:1].expand_as(table).clone()
        limit = getattr(language_model.model.config, "max_position_embeddings", None)
        tokenizer.model_max_length = limit or tokenizer.model_max_length
        try:
            with write_dir_atomically(folder, replace=True) as temporary:
                language_model.model.save_pretrained(temporary, state_dict=weights)
                tokenizer.save_pretrained(temporary)
            print(f"model and tokenizer: {folder}")
        except (OSError, SafetensorError) as failure:
            error = " ".join(str(failure).split())
    if any_process(bool(error), accelerator):
        raise InputError(
            f"run.folder must have room for the model, got {error or 'none'}; make some, the same "
            "command goes on"
        )
