"""Checkpoints on disk: written atomically, verified by hashes, equal for every sharding.

    runs/<name>/settings.yaml        settings of the run
                environment.json     versions, machine, git commit
                lock                 held by the process that uses the folder
                log.jsonl            one row per report and per evaluation
                checkpoints/step-N/  weights.safetensors, optimizer.safetensors, state.json,
                                     manifest.json (their SHA-256)
                model/               the finished model and tokenizer, for from_pretrained

A checkpoint is written to a temporary folder, flushed and renamed, so it is complete or absent. It
holds no random state: order, masks and dropout are functions of (seed, step).
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from train.settings import InputError

WEIGHTS, OPTIMIZER, STATE = FILES = ("weights.safetensors", "optimizer.safetensors", "state.json")
MANIFEST = "manifest.json"

TrainingState = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Weights by name, and optimizer tensors by "<parameter number>.<name>"; none is sharded."""


def gather_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool = True
) -> TrainingState:
    """Gather the tensors of a checkpoint; a collective call if the model is sharded.

    Args:
        model: The model.
        optimizer: Its optimizer.
        keep: Whether this process needs the result; others get empty dictionaries.
    """
    moments = {
        f"{number}.{name}": value
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    return gather_weights(model, keep), _gather(moments, keep)


def gather_weights(model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """Gather parameters and saved buffers by name, tied ones once; as `gather_state`."""
    return _gather({name: tensor.detach() for name, tensor in _saved_tensors(model).items()}, keep)


def _gather(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    # each tensor goes to the host before the next is gathered: a GPU holds one full tensor at most
    gathered = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor)
        if keep:
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
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    tensor = tensor.to(parameter.device)
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)


def save(folder: Path, step: int, training_state: TrainingState, state: dict[str, Any]) -> Path:
    """Write `checkpoints/step-N` atomically.

    Args:
        folder: The run's folder.
        step: Number of completed optimizer steps.
        training_state: From `gather_state`.
        state: JSON values, returned by `load`.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: It could not be written, for example on a full disk; nothing is left of it.
    """
    target = folder / "checkpoints" / f"step-{step:08d}"
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for tensors, name in zip(training_state, (WEIGHTS, OPTIMIZER)):
            save_file(tensors, temporary / name)
        (temporary / STATE).write_text(json.dumps({"step": step} | state))
        hashes = {name: _sha256(temporary / name) for name in FILES}
        (temporary / MANIFEST).write_text(json.dumps(hashes, indent=2))
        for path in [*temporary.iterdir(), temporary]:
            _fsync(path)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        _fsync(target.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"{target}: {' '.join(str(error).split())}") from error
    return target


def latest(folder: Path) -> Path | None:
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
        rule, found = "must hold a complete checkpoint", f"{damaged[0][0]}: {damaged[0][1]}"
        raise InputError(f"{folder}/checkpoints {rule}, got {found}; delete it to begin again")
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


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load a checkpoint into a model and its optimizer, sharded or not.

    Returns:
        The `state` it was saved with, and its `step`.

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
    return json.loads((path / STATE).read_text())


def prune(folder: Path, keep: int) -> None:
    """Delete all checkpoints but the newest `keep` and the best, and partial ones."""
    checkpoints = sorted((folder / "checkpoints").glob("step-*[0-9]"))
    losses = [(loss, path) for path in checkpoints if (loss := _validation_loss(path)) is not None]
    best = min(losses)[1] if losses else None
    old = [path for path in checkpoints[:-keep] if path != best]
    for path in [*old, *(folder / "checkpoints").glob("*.tmp")]:
        shutil.rmtree(path)


def _validation_loss(path: Path) -> float | None:
    try:
        return json.loads((path / STATE).read_text()).get("validation_loss")
    except (OSError, ValueError, AttributeError):
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
