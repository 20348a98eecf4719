"""Checkpoints: exact, atomic, and distrustful of what lies on the disk."""

import errno
import fcntl
import itertools
import json
import os
import platform
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from launched_runs import TORCHRUN, killed_at, list_checkpoints, wait_for
from tiny import ROOT, command, refused
from train.loop import checkpoint


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, step: int) -> Path:
    return checkpoint.write_checkpoint(folder, step, checkpoint.gather_tensors(*trained()), {})


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["bit", "truncated", "deleted"])
def test_damage_to_any_file_is_noticed_and_an_older_checkpoint_used(tmp_path, name, damage, capsys):
    save(tmp_path, 3)
    for _ in range(2):  # the same step may be damaged again
        file = save(tmp_path, 6) / name
        content = bytearray(file.read_bytes())
        if damage == "deleted":
            file.unlink()
        else:
            content[len(content) // 2] ^= 1
            file.write_bytes(content if damage == "bit" else content[: len(content) // 2])
        assert checkpoint.recover_latest(tmp_path).name == "step-00000003"
        (line,) = capsys.readouterr().out.splitlines()
        assert "step-00000006 is damaged" in line
        assert name in line or name == "manifest.json"
    save(tmp_path, 5)
    checkpoint.prune(tmp_path, 1)  # the damaged one does not count as kept
    assert checkpoint.recover_latest(tmp_path).name == "step-00000005"


def test_a_folder_without_checkpoint_has_none(tmp_path):
    assert checkpoint.recover_latest(tmp_path) is None
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    rule = f"{tmp_path}/checkpoints must hold a complete checkpoint"
    refused(lambda: checkpoint.recover_latest(tmp_path), rule, "step-00000001")


def test_a_foreign_or_empty_folder_is_set_aside_with_one_warning(tmp_path, capsys):
    save(tmp_path, 3)
    for name in ("step-00000009", "step-99-of-mine1"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "step-99-of-mine1" / "notes.txt").write_text("do not lose me")
    assert checkpoint.recover_latest(tmp_path).name == "step-00000003"
    foreign, empty = capsys.readouterr().out.splitlines()
    assert "step-99-of-mine1" in foreign
    assert "step-00000009" in empty
    assert list(tmp_path.rglob("notes.txt"))


def save_and_prune(folder: Path, step: int) -> None:
    save(folder, step)
    checkpoint.prune(folder, 2)


def save_in_halves(tensors: dict, file: Path) -> None:
    """`save_file` by writes that `killed_at` sees, the second of them over half of the file."""
    data = safetensors.torch.save(tensors)
    file.write_bytes(data[: len(data) // 2])
    file.write_bytes(data)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_at_any_write_flush_or_rename_of_a_save_leaves_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "save_file", save_in_halves)
    begun = tmp_path / "begun"
    for step in (1, 2):
        save(begun, step)
    killed = []
    for last in itertools.count(1):
        run = tmp_path / f"killed-{last}"
        shutil.copytree(begun, run)
        was_killed = killed_at(last, partial(save_and_prune, run, 3))
        path = checkpoint.recover_latest(run)
        killed.append(path.name)
        checkpoint.load_tensors(path, *trained())
        assert json.loads((path / "state.json").read_text())["step"] == int(path.name[-1])
        save_and_prune(run, 4)
        assert list_checkpoints(run) == [path.name, "step-00000004"]
        if not was_killed:
            break
    assert killed == sorted(killed)  # the new one is there from one moment on
    assert set(killed) == {"step-00000002", "step-00000003"}
    assert len(killed) > 17


HOLDER = """
import os, pathlib, sys, time
from accelerate import Accelerator
from train.loop.checkpoint import lock_run_dir
with lock_run_dir(pathlib.Path(sys.argv[1]), Accelerator(cpu=True)):
    if os.fork():  # what is left, like a data worker, must not keep the run from going on
        print('locked', flush=True)
    time.sleep(600)
"""


def test_a_run_folder_belongs_to_one_process_until_it_dies(tmp_path, start, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "LOCK_TIMEOUT", 1.0)
    holder = start("-c", HOLDER, tmp_path)
    wait_for(lambda: "locked" in (tmp_path / "output").read_text())
    found = f"got {tmp_path} in use by process {holder.pid} on {platform.node()};"
    lock = checkpoint.lock_run_dir(tmp_path, Accelerator(cpu=True))
    refused(lock.__enter__, "run.folder must be free", found)
    assert capsys.readouterr().out.count("waiting up to 1 s: ") == 1
    holder.kill()
    holder.wait()
    with checkpoint.lock_run_dir(tmp_path, Accelerator(cpu=True)):
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} ")
    assert not capsys.readouterr().out


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    no_locks = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=no_locks))
    with checkpoint.lock_run_dir(tmp_path, Accelerator(cpu=True)):
        pass
    assert "lock: No locks available; start a run only once" in capsys.readouterr().out


def test_tied_weights_are_saved_once(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    held = checkpoint.gather_tensors(model, torch.optim.AdamW(model.parameters()))
    path = checkpoint.write_checkpoint(tmp_path, 1, held, {})
    assert sorted(load_file(path / "weights.safetensors")) == ["a.bias", "a.weight", "b.bias"]


@pytest.mark.slow
def test_sharded_models_train_and_are_saved_as_whole_ones(tmp_path):
    script = "tests/support/sharded_training.py"
    done = command(*TORCHRUN, script, tmp_path / "run", PYTHONPATH=f"{ROOT}:tests/support")
    assert done.stdout.count("equal") == 2
