"""What a run folder holds, and how it survives a kill at any moment.

    runs/<name>/settings.yaml        the settings the run goes by
                environment.json     versions, machine, commit
                lock                 which process uses the folder, see `lock_run_dir`
                log.jsonl            one line an interval, one an evaluation
                checkpoints/step-N/  weights.safetensors, optimizer.safetensors, state.json,
                                     manifest.json (a hash of each)
                model/               the finished model and tokenizer, for from_pretrained

A checkpoint is written beside its place, flushed, and renamed: it is there whole or not at all. It
holds no random state, because order, masks and dropout are functions of (seed, step).
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
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from train.settings import InputError, require

FILES = ("weights.safetensors", "optimizer.safetensors", "state.json")
MANIFEST = "manifest.json"

LOCK_TIMEOUT = 60.0
"""Seconds a launch waits for another of the same run, which may be about to save and end."""


Content = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Weights by name and the optimizer's tensors by number of the parameter, all whole."""


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool = True) -> Content:
    """What a checkpoint holds of model and optimizer; every process must call it (FSDP gathers).

    Args:
        model: Its parameters are taken by name, tied ones once.
        optimizer: Its tensors are taken by parameter number.
        keep: Whether this process wants it, or only helps to gather it and gets nothing.
    """
    moments = {
        f"{number}.{name}": value
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    return gather_weights(model, keep), _gathered(moments, keep)


def gather_weights(model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, whole, tied once; every process must call it."""
    return _gathered({name: tensor.detach() for name, tensor in _tensors(model).items()}, keep)


def _gathered(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """The tensors, whole; a sharded one goes to the host before the next is put together.

    So a GPU has room for its shards and one whole tensor, not for model and moments of all.
    """
    kept = {}
    for name, tensor in tensors.items():
        one = full_tensor(tensor)
        if keep:
            kept[name] = one.cpu() if isinstance(tensor, DTensor) else one
    return kept


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """What training changes: parameters, and buffers such as the draws of random features."""
    saved = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in saved}
    return dict(model.named_parameters()) | buffers


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor with all its parts, where it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()


def _as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor sharded as the parameter is."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    tensor = tensor.to(parameter.device)
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)


def save(folder: Path, step: int, held: Content, state: dict[str, Any]) -> Path:
    """Write `checkpoints/step-N` atomically.

    Args:
        folder: The run's folder.
        step: Optimiser steps done.
        held: From `gather_state`.
        state: JSON values to go on from.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: It could not be written, on a full disk for instance; nothing is left of it.
    """
    final = folder / "checkpoints" / f"step-{step:08d}"
    unfinished = final.with_name(f"{final.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        for tensors, name in zip(held, FILES):
            save_file(tensors, unfinished / name)
        (unfinished / FILES[2]).write_text(json.dumps({"step": step} | state))
        hashes = {name: _sha256(unfinished / name) for name in FILES}
        (unfinished / MANIFEST).write_text(json.dumps(hashes, indent=2))
        for path in [*unfinished.iterdir(), unfinished]:
            _flush(path)
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        _flush(final.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(f"{final}: {' '.join(str(error).split())}") from error
    return final


@contextmanager
def lock_run_dir(folder: Path) -> Iterator[None]:
    """Keep other launches out of a run's folder; however the process dies, the kernel lets them in.

    The lock is fcntl's: forked data workers would hold on to one of flock's after a kill.

    Raises:
        InputError: Another process uses the folder, and still does after `LOCK_TIMEOUT`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as stream:
        started, waits = time.monotonic(), False
        while not _locked(stream):
            stream.seek(0)
            holder = stream.read() or "another process"
            found, remedy = f"{folder} in use by {holder}", "end it, or choose another run.name"
            over = time.monotonic() - started > LOCK_TIMEOUT
            require(not over, "run.folder", "must be free", found, remedy)
            if not waits:
                print(f"waiting up to {LOCK_TIMEOUT:.0f} s: {found}", flush=True)
            waits = True
            time.sleep(0.2)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {platform.node()}")
        stream.flush()
        yield


def _locked(stream: TextIO) -> bool:
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:  # Lustre as it is often mounted
        print(f"warning: no lock on {stream.name}: {error.strerror}; start a run only once")
    return True


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint; damaged ones newer than it are set aside, with a warning.

    Raises:
        InputError: There are checkpoints and all are damaged.
    """
    damaged: list[tuple[Path, str]] = []
    for path in sorted((folder / "checkpoints").glob("step-*[0-9]"), reverse=True):
        damage = _damage(path)
        if damage is None:
            for bad, why in damaged:
                # out of the count of those kept, and still there to be looked at
                aside = bad.with_name(f"damaged-{bad.name}")
                shutil.rmtree(aside, ignore_errors=True)  # the same step may be damaged again
                bad.rename(aside)
                print(f"warning: {bad} is damaged ({why}); going on from {path.name}", flush=True)
            return path
        damaged.append((path, damage))
    if damaged:
        rule, found = "must hold a complete checkpoint", f"{damaged[0][0]}: {damaged[0][1]}"
        raise InputError(f"{folder}/checkpoints {rule}, got {found}; delete it to begin again")
    return None


def _damage(path: Path) -> str | None:
    try:
        hashes = json.loads((path / MANIFEST).read_text())
        for name in FILES:
            if _sha256(path / name) != hashes.get(name):
                return f"{name} is not what was saved"
    except (OSError, ValueError, AttributeError) as error:
        return f"{MANIFEST}: {error}"
    return None


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint's weights and moments in place.

    Returns:
        The `state` it was saved with, and its `step`.

    Raises:
        InputError: It belongs to another model.
    """
    held, moments = load_file(path / FILES[0]), load_file(path / FILES[1])
    parameters = _tensors(model)
    shapes, own = ({n: t.shape for n, t in ts.items()} for ts in (held, parameters))
    if shapes != own:
        raise InputError(f"{path} must hold this model, got another's; choose another run.name")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_as(held[name], parameter))
    described = optimizer.state_dict()
    described["state"] = _state_of(moments, optimizer)
    optimizer.load_state_dict(described)
    return json.loads((path / FILES[2]).read_text())


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints and the best, and what a killed save left."""
    kept = sorted((folder / "checkpoints").glob("step-*[0-9]"))
    measured = [(loss, path) for path in kept if (loss := _validation_loss(path)) is not None]
    best = min(measured)[1] if measured else None
    old = [path for path in kept[:-keep] if path != best]
    for path in [*old, *(folder / "checkpoints").glob("*.tmp")]:
        shutil.rmtree(path)


def _validation_loss(path: Path) -> float | None:
    try:
        return json.loads((path / FILES[2]).read_text()).get("validation_loss")
    except (OSError, ValueError, AttributeError):
        return None


def _state_of(
    moments: dict[str, Tensor], optimizer: torch.optim.Optimizer
) -> dict[int, dict[str, Tensor]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = _as(value, parameters[int(number)])
    return state


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
