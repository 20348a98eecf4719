"""The folder of a run: lock, checkpoints, finished model.

    runs/<name>/settings.yaml        settings of the run
                environment.json     versions, machine, git commit
                lock                 held by the process that uses the folder
                log.jsonl            one row per report and per evaluation
                tracker/             the same for TensorBoard
                checkpoints/step-N/  weights.safetensors, optimizer.safetensors, state.json,
                                     manifest.json (their SHA-256)
                model/               the finished model and tokenizer, for from_pretrained

A checkpoint is written atomically, verified by hashes when it is read, and equal for every
sharding. It holds no random state: order, masks and dropout are functions of settings and step
(docs/design/determinism.md); nor the loss scale of fp16, which is searched anew.

Files are touched by the main process; whether it succeeded is reduced over all processes, so that
all of them continue or stop together.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedTokenizerBase

from train.atomic_dir import UNFINISHED, full_disk_errno, write_dir_atomically
from train.data.corpus import TokenStore
from train.data.documents import short_hash
from train.loop.language_model import LanguageModel
from train.loop.launch import any_process
from train.loop.run_log import INITIAL_STATE, RunLog
from train.loop.run_metadata import changed_versions, check_changed_settings, write_metadata
from train.settings import InputError, PretrainSettings, first_line

LOCK_TIMEOUT = 60.0
"""Seconds a launch waits for another of the same run, which may be about to save and exit."""

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
FILES = (WEIGHTS, OPTIMIZER, STATE)
MANIFEST = "manifest.json"

TEXT_KEYS = "corpus.tokenizer, corpus.train and corpus.validation"
"""Settings that decide the tokens of a run."""


@contextmanager
def lock_run_dir(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Lock the run's folder for this launch; a collective call.

    The kernel unlocks it however the main process ends. fcntl's locks are not inherited by
    forked processes, which may outlive a killed one; flock's are.

    Raises:
        InputError: Another launch still holds the lock after `LOCK_TIMEOUT`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as stream:
        holder = _wait_for_lock(stream) if accelerator.is_main_process else ""
        if any_process(bool(holder), accelerator):
            raise InputError(
                f"run.folder must be free, got {folder} in use by {holder or 'another process'}; "
                "end it, or choose another run.name"
            )
        yield


def _wait_for_lock(stream: TextIO) -> str:
    """Lock a file and write this process into it; returns the holder if it stays locked."""
    deadline, holder = time.monotonic() + LOCK_TIMEOUT, ""
    while True:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            stream.seek(0)
            found = stream.read() or "another process"
            if time.monotonic() > deadline:
                return found
            if not holder:
                folder = Path(stream.name).parent
                print(f"waiting up to {LOCK_TIMEOUT:.0f} s: {folder} in use by {found}", flush=True)
            holder = found
            time.sleep(0.2)
        except OSError as error:  # a file system without locks, such as Lustre by default
            print(f"warning: no lock on {stream.name}: {error.strerror}; start a run only once")
            break
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {platform.node()}")
    stream.flush()
    return ""


@dataclass
class Checkpoints:
    """Resumes a run from its newest checkpoint, and saves further ones.

    The `state` of a run, in state.json, is a dictionary of JSON values: `step`, the steps done;
    `data`, the names of the stores; `tokenizer` and `config`, their hashes; and of `RunLog.state`
    `tokens` of the run until the last report, `seconds` of the run, `reported`, the step of the
    last report, `pending`, the `Sums` since then as a list, and `unreported`, the seconds since
    then, in all and waiting for batches.

    `stores` are the token stores of all stages and of the held-out text.
    """

    settings: PretrainSettings
    folder: Path
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    stores: list[TokenStore]

    def __post_init__(self) -> None:
        names = [store.name for store in self.stores]
        self.hashes = {"data": names, "tokenizer": self.stores[-1].tokenizer}
        config = self.model.model.config.to_diff_dict()
        config.pop("transformers_version", None)
        self.hashes["config"] = short_hash(config)

    def resume(self, total: int) -> dict[str, Any]:
        """Load the newest intact checkpoint, if any; then write metadata, and delete an old model.

        These come last, so that a launch that cannot continue changes nothing but the names of
        damaged checkpoints and the tracker's files. A finished run keeps its settings and model;
        one that now continues to `total` steps loses it. Returns the state to continue from.

        Raises:
            InputError: Settings, text or vocabulary differ from those at the beginning of the run,
                the checkpoint belongs to another model or is from a step beyond `total`, machines
                see different checkpoints, or a finished run has none.
        """
        # a second time: another launch may have begun the run while this one waited for the lock
        precision = self.accelerator.mixed_precision
        changed = check_changed_settings(self.folder, self.settings, precision)
        with self.accelerator.main_process_first():  # it renames damaged checkpoints
            path = recover_latest(self.folder)
        if path is None and (self.folder / "model").exists():
            raise InputError(
                f"run.name must have its checkpoints, got {self.folder} with a model and none; "
                "choose another, or delete the folder to train it anew"
            )
        state = INITIAL_STATE | {"step": 0} | self.hashes  # a new run begins with what it has now
        if path is not None:
            state |= json.loads((path / STATE).read_text())
        self._check_resumable(state, total)  # before another text's vocabulary meets the weights
        step, finished = state["step"], state["step"] == total
        if path is not None:
            load_tensors(path, self.model, self.optimizer)
            self.accelerator.print(f"{'finished' if finished else 'going on'} after step {step}")
        if self.accelerator.is_main_process:
            if state["data"] != self.hashes["data"]:
                changed[f"the tokens of {TEXT_KEYS}"] = state["data"], self.hashes["data"]
            if state["config"] != self.hashes["config"]:
                changed["the model's configuration"] = state["config"], self.hashes["config"]
            changed |= changed_versions(self.folder, self.accelerator) if path else {}
            changed = {} if finished else changed  # nothing was trained with them
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            write_metadata(self.folder, self.settings, self.accelerator, step, parameters, changed)
            if not finished:
                shutil.rmtree(self.folder / "model", ignore_errors=True)
        return state

    def _check_resumable(self, state: dict[str, Any], total: int) -> None:
        """Check that the run can go on from a state; a collective call."""
        trained = state["step"]
        if trained > total:
            raise InputError(
                f"optim must be a budget of at least the {trained} steps that the run has trained, "
                f"got {total} steps; train longer, or choose another run.name"
            )
        if state["data"] != self.hashes["data"] and not self.settings.run.allow_drift:
            raise InputError(
                f"{TEXT_KEYS} must give the tokens {state['data']} the run began with, "
                f"got {self.hashes['data']}; choose another run.name, or set run.allow_drift true"
            )
        if state["tokenizer"] != self.hashes["tokenizer"]:
            raise InputError(
                "corpus.tokenizer must be the vocabulary that the run began with, "
                f"got {self.settings.corpus.tokenizer or 'null, which learns one of each text'}; "
                "give the folder printed at the start of the run"
            )
        if state["config"] != self.hashes["config"] and not self.settings.run.allow_drift:
            raise InputError(
                "model.config must give the configuration that the run began with, got another, by "
                "an edit of the folder model.init or a new version of transformers; go back, or "
                "set run.allow_drift true"
            )
        steps = {*gather_object([trained])}
        if len(steps) != 1:
            raise InputError(
                f"run.folder must hold one checkpoint for all machines, got steps {steps}; "
                "put it on a shared disk"
            )

    def save(self, step: int, run_log: RunLog, is_last: bool) -> None:
        """Save a checkpoint and delete old ones; a collective call.

        After the last one this launch trains no more.

        Raises:
            InputError: The last checkpoint could not be written; of others this is a warning.
        """
        error = ""
        state = run_log.state() | self.hashes
        tensors = gather_tensors(self.model, self.optimizer)
        if self.accelerator.is_main_process:
            try:
                write_checkpoint(self.folder, step, tensors, state)
            except (OSError, SafetensorError) as failure:
                error = first_line(failure)
                run_log.warn(f"no checkpoint after step {step}, the one before stays: {error}")
            try:
                prune(self.folder, self.settings.run.keep)
            except OSError as failure:
                run_log.warn(f"older checkpoints could not be deleted: {failure}")
        _check_written(error, "a checkpoint", self.accelerator, is_needed=is_last)


def _check_written(error: str, what: str, accelerator: Accelerator, is_needed: bool = True) -> None:
    """Refuse, on all processes, an error of one; a collective call, which waits for the disk."""
    if any_process(bool(error), accelerator) and is_needed:
        raise InputError(
            f"run.folder must have room for {what}, got {error or 'an error of another process'}; "
            "make some, the same command goes on"
        )


def save_model(
    language_model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    model_folder: Path,
    accelerator: Accelerator,
    copy_token_type: bool,
) -> None:
    """Write the finished model and its tokenizer atomically; a collective call.

    The tokenizer's `model_max_length` becomes the model's. `copy_token_type` gives every token type
    the embedding of type 0, the only one that pretraining trains: with its random initial values a
    second text would be unreadable (12 % instead of 44 % masked accuracy for the models of
    results/pair-50m).

    Raises:
        InputError: They could not be written; an earlier model stays.
    """
    weights = gather_weights(language_model.model)
    error = ""
    if accelerator.is_main_process:
        for name, table in weights.items():
            if copy_token_type and name.endswith("token_type_embeddings.weight"):
                weights[name] = table[:1].expand_as(table).clone()
        limit = getattr(language_model.model.config, "max_position_embeddings", None)
        tokenizer.model_max_length = limit or tokenizer.model_max_length
        try:
            with write_dir_atomically(model_folder, replace=True) as temporary:
                language_model.model.save_pretrained(temporary, state_dict=weights)
                tokenizer.save_pretrained(temporary)
            print(f"model and tokenizer: {model_folder}")
        except Exception as failure:  # that of tokenizers is bare
            is_known = isinstance(failure, OSError | SafetensorError)
            if not is_known and full_disk_errno(failure) is None:
                raise
            error = first_line(failure)
    _check_written(error, "the model", accelerator)


def gather_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gather the tensors of a checkpoint; a collective call if the model is sharded.

    Returns:
        Weights by name, and optimizer tensors by "<parameter number>.<name>"; empty on all
        processes but the first.
    """
    moments = {
        f"{number}.{name}": value
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    return gather_weights(model), _gather(moments)


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Gather parameters and saved buffers by name, tied ones once; as `gather_tensors`."""
    return _gather({name: tensor.detach() for name, tensor in _saved_tensors(model).items()})


def _gather(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    gathered = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor)
        if is_main:  # at once to the host: a GPU holds one full tensor at most
            gathered[name] = full.cpu() if isinstance(tensor, DTensor) else full
    return gathered


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and the buffers in `state_dict`, such as the random features of FAVOR+."""
    saved = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in saved}
    return dict(model.named_parameters()) | buffers


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the unsharded, contiguous tensor; a collective call if it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()


def _shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Shard a moment as its parameter; counters such as AdamW's `step` stay as they are."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    tensor = tensor.to(parameter.device)
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)


def write_checkpoint(
    folder: Path,
    step: int,
    tensors: tuple[dict[str, Tensor], dict[str, Tensor]],
    state: dict[str, Any],
) -> Path:
    """Write `checkpoints/step-N` of a run after N optimizer steps, atomically, and return it.

    `tensors` are from `gather_tensors`; `state` holds JSON values.

    Raises:
        OSError, SafetensorError: It could not be written, for example on a full disk; nothing is
            left of it.
    """
    target = folder / "checkpoints" / f"step-{step:08d}"
    with write_dir_atomically(target, replace=True) as temporary:
        for part, name in zip(tensors, (WEIGHTS, OPTIMIZER)):
            save_file(part, temporary / name)
        (temporary / STATE).write_text(json.dumps({"step": step} | state))
        hashes = {name: _sha256(temporary / name) for name in FILES}
        (temporary / MANIFEST).write_text(json.dumps(hashes, indent=2))
    return target


def recover_latest(folder: Path) -> Path | None:
    """Return the newest intact checkpoint, or None if there is none.

    Damaged checkpoints newer than it are renamed to `damaged-step-N`, with a warning.

    Raises:
        InputError: All checkpoints are damaged.
    """
    damaged: list[tuple[Path, str]] = []
    for path in sorted((folder / "checkpoints").glob("step-*[0-9]"), reverse=True):
        damage = _find_damage(path)
        if damage is not None:
            damaged.append((path, damage))
            continue
        for bad, damage in damaged:
            renamed = bad.with_name(f"damaged-{bad.name}")
            shutil.rmtree(renamed, ignore_errors=True)  # the same step may be damaged again
            bad.rename(renamed)
            print(f"warning: {bad} is damaged ({damage}); going on from {path.name}", flush=True)
        return path
    if damaged:
        bad, damage = damaged[0]
        raise InputError(
            f"{folder}/checkpoints must hold a complete checkpoint, got {bad}: {damage}; delete it "
            "to begin again"
        )
    return None


def _find_damage(path: Path) -> str | None:
    try:
        hashes = json.loads((path / MANIFEST).read_text())
        for name in FILES:
            if _sha256(path / name) != hashes.get(name):
                return f"{name} is not what was saved"
    except (OSError, ValueError, AttributeError) as error:
        return f"{MANIFEST}: {error}"
    return None


def load_tensors(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the tensors of a checkpoint into a model and its optimizer.

    Raises:
        InputError: It belongs to another model.
    """
    weights, moments = load_file(path / WEIGHTS), load_file(path / OPTIMIZER)
    tensors = _saved_tensors(model)
    if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in tensors.items()}:
        raise InputError(f"{path} must hold this model, got another's; choose another run.name")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(_shard_like(weights[name], tensor))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer_state: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        number, name = key.split(".", 1)
        value = _shard_like(value, parameters[int(number)])
        optimizer_state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(optimizer.state_dict() | {"state": optimizer_state})


def prune(folder: Path, keep: int) -> None:
    """Delete all checkpoints but the newest `keep`, and what killed saves left."""
    checkpoints = sorted((folder / "checkpoints").glob("step-*[0-9]"))
    for path in [*checkpoints[:-keep], *(folder / "checkpoints").glob(f".*{UNFINISHED}*")]:
        shutil.rmtree(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
