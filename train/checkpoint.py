"""What a run folder holds, and how it survives a kill at any moment.

    runs/<name>/settings.yaml        the settings the run was started with
                environment.json     versions, machine, commit
                log.jsonl            one line an interval, one an evaluation
                checkpoints/step-N/  weights.safetensors, optimizer.safetensors, state.json,
                                     manifest.json (a hash of each)
                model/               the finished model and tokenizer, for from_pretrained

A checkpoint is written beside its place, flushed, and renamed: it is there whole or not at all. It
holds no random state, because order, masks and dropout are functions of (seed, step).
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from train.settings import InputError

FILES = ("weights.safetensors", "optimizer.safetensors", "state.json")
MANIFEST = "manifest.json"


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> Path:
    """Write `checkpoints/step-N` atomically.

    Args:
        folder: The run's folder.
        step: Optimiser steps done.
        model: Its parameters are saved by name, tied ones once.
        optimizer: Its tensors are saved by parameter number.
        state: JSON values to go on from.

    Returns:
        The checkpoint's folder.
    """
    final = folder / "checkpoints" / f"step-{step:08d}"
    unfinished = final.with_name(f"{final.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(weights, unfinished / FILES[0])
    save_file(_moments(optimizer), unfinished / FILES[1])
    (unfinished / FILES[2]).write_text(json.dumps({"step": step} | state))
    hashes = {name: _sha256(unfinished / name) for name in FILES}
    (unfinished / MANIFEST).write_text(json.dumps(hashes, indent=2))
    for path in [*unfinished.iterdir(), unfinished]:
        _flush(path)
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    _flush(final.parent)
    return final


def newest(folder: Path) -> Path | None:
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
                bad.rename(bad.with_name(f"damaged-{bad.name}"))
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
    weights, moments = load_file(path / FILES[0]), load_file(path / FILES[1])
    parameters = dict(model.named_parameters())
    shapes, own = ({n: t.shape for n, t in ts.items()} for ts in (weights, parameters))
    if shapes != own:
        raise InputError(f"{path} must hold this model, got another's; choose another run.name")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    described = optimizer.state_dict()
    described["state"] = _state_of(moments)
    optimizer.load_state_dict(described)
    return json.loads((path / FILES[2]).read_text())


def retain(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what a killed save left behind."""
    kept = sorted((folder / "checkpoints").glob("step-*[0-9]"))
    for path in [*kept[:-keep], *(folder / "checkpoints").glob("*.tmp")]:
        shutil.rmtree(path)


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value.contiguous()
        for number, values in state.items()
        for name, value in values.items()
    }


def _state_of(moments: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = value
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
