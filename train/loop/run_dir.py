"""What a launch does with its run's folder: claims it, goes on from it, saves into it.

`checkpoint` knows the files; here all processes act together: what one of them finds, all obey.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from train.loop import checkpoint
from train.loop.atomic_dir import write_dir_atomically
from train.loop.objective import LanguageModel
from train.loop.run_log import INITIAL_STATE, RunLog, changed_settings, write_header
from train.settings import InputError, PretrainSettings, require


@contextmanager
def lock_run_dir(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Keep the run's folder to this launch; the main process has it, the others wait for it.

    Raises:
        InputError: Another launch does not let go of it.
    """
    with ExitStack() as held:
        refused = ""
        if accelerator.is_main_process:
            try:
                held.enter_context(checkpoint.lock_run_dir(folder))
            except InputError as error:
                refused = str(error)
        if any_process(bool(refused), accelerator):
            raise InputError(refused or "run.folder must be free, got one in use; see process 0")
        yield


def any_process(said: bool, accelerator: Accelerator) -> bool:
    """Whether any process says so; they wait for each other."""
    return bool(accelerator.reduce(torch.tensor(float(said), device=accelerator.device)).item())


def resume(
    settings: PretrainSettings,
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    data: list[str],
    total: int | None,
) -> dict[str, Any]:
    """Load the newest complete checkpoint, if there is one; says where the run goes on.

    Only after that is the run's header written, so that settings which cannot go on change nothing.
    If the run ended earlier before, and now goes on to `total` steps, its model is taken away: the
    log no longer tells of it.

    Raises:
        InputError: The text or vocabulary is not what the run began with, the checkpoint is another
            model's, or machines hold different ones.
    """
    with accelerator.main_process_first():  # which sets damaged ones aside
        path = checkpoint.latest(folder)
    state = INITIAL_STATE | {"step": 0, "data": data}
    if path is not None:
        state |= checkpoint.load(path, model, optimizer)
        accelerator.print(f"going on after step {state['step']}")
    same, rule = state["data"] == data, f"must give the tokens {state['data']} the run began with"
    remedy = "choose another run.name, or set run.allow_drift true"
    free = same or settings.run.allow_drift
    keys = "corpus.tokenizer, corpus.train and corpus.validation"
    require(free, keys, rule, data, remedy)
    steps = accelerator.gather(torch.tensor([state["step"]], device=accelerator.device))
    found, rule = steps.unique().tolist(), "must hold one checkpoint for all machines"
    require(len(found) == 1, "run.folder", rule, f"steps {found}", "put it on a shared disk")
    if accelerator.is_main_process:
        changed = changed_settings(folder, settings, accelerator.mixed_precision)
        if not same:
            changed[f"the tokens of {keys}"] = state["data"], data
        size = sum(parameter.numel() for parameter in model.parameters())
        write_header(folder, settings, accelerator, state["step"], size, changed)
        if state["step"] != total:
            shutil.rmtree(folder / "model", ignore_errors=True)
    return state


@dataclass
class CheckpointSaver:
    """Writes checkpoints of a run on the main process, and deletes old ones."""

    folder: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: list[str]
    keep: int

    def save(self, step: int, journal: RunLog, last: bool) -> None:
        """Save, and go on without if the disk is full, unless it is the last.

        Raises:
            InputError: The last checkpoint could not be written.
        """
        accelerator = journal.accelerator
        state = journal.state(step) | {"data": self.data}
        held = checkpoint.gather_state(self.model, self.optimizer, keep=accelerator.is_main_process)
        failed = ""
        if accelerator.is_main_process:
            try:
                checkpoint.save(self.folder, step, held, state)
                checkpoint.prune(self.folder, self.keep)
            except OSError as error:
                failed = str(error)
                journal.warn(f"no checkpoint after step {step}, the one before stays: {failed}")
        if any_process(bool(failed), accelerator) and last:
            raise InputError(
                f"run.folder must have room for a checkpoint, got {failed or 'none'}; make some, "
                "the same command goes on"
            )


def save_model(
    objective: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    accelerator: Accelerator,
    fresh: bool,
) -> None:
    """Write the finished model and its tokenizer; every process must call it.

    The tokenizer is told the positions of the model, whatever vocabulary it was learned with.

    Args:
        objective: With the model.
        tokenizer: Of the run.
        folder: Where to.
        accelerator: Of the launch.
        fresh: Whether the run began with weights of its own, so that it alone has taught the model.

    Raises:
        InputError: They could not be written; an earlier model stays.
    """
    main = accelerator.is_main_process
    weights = checkpoint.gather_weights(objective.model, keep=main)  # each process may hold a part
    failed = ""
    if fresh:
        weights = _with_token_types(weights)
    if main:
        limit = getattr(objective.model.config, "max_position_embeddings", None)
        tokenizer.model_max_length = limit or tokenizer.model_max_length
        try:
            with write_dir_atomically(folder, replace=True) as unfinished:
                objective.model.save_pretrained(unfinished, state_dict=weights)
                tokenizer.save_pretrained(unfinished)
            print(f"model and tokenizer: {folder}")
        except (OSError, SafetensorError) as error:
            failed = " ".join(str(error).split())
    if any_process(bool(failed), accelerator):
        raise InputError(
            f"run.folder must have room for the model, got {failed or 'none'}; make some, the same "
            "command goes on"
        )


def _with_token_types(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights in which every token type has the embedding of type 0, the only one ever shown.

    The others still have their drawn values, with which a second text cannot be read: the pair of
    results/pair guesses 12 % of its masked words right instead of 44 %.
    """
    types = (name for name in weights if name.endswith("token_type_embeddings.weight"))
    return weights | {name: weights[name][:1].expand_as(weights[name]).clone() for name in types}
