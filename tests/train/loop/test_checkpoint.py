"""Checkpoints: exact, atomic, and distrustful of what lies on the disk."""

import errno
import fcntl
import os
import platform
import signal
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from tiny import ROOT, command
from train.loop import checkpoint
from train.settings import InputError


def trained(steps: int = 3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        move(model, optimizer)
    return model, optimizer


def move(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["bit", "truncated", "deleted"])
def test_damage_to_any_file_is_noticed_and_the_checkpoint_before_it_used(
    tmp_path, name, damage, capsys
):
    for step in (3, 6):
        checkpoint.save(tmp_path, step, checkpoint.gather_state(*trained(step)), {})
    file = tmp_path / "checkpoints" / "step-00000006" / name
    content = bytearray(file.read_bytes())
    if damage == "deleted":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content if damage == "bit" else content[: len(content) // 2])
    assert checkpoint.latest(tmp_path).name == "step-00000003"
    (line,) = capsys.readouterr().out.splitlines()
    assert "step-00000006 is damaged" in line
    assert name in line or name == "manifest.json"
    checkpoint.save(tmp_path, 5, checkpoint.gather_state(*trained(5)), {})
    checkpoint.prune(tmp_path, 1)  # the damaged one does not count as kept
    assert checkpoint.latest(tmp_path).name == "step-00000005"


def test_a_folder_without_checkpoint_has_none(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    for content in (None, "{}", "[]"):
        if content is not None:
            (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").write_text(content)
        with pytest.raises(
            InputError, match="must hold a complete checkpoint, got .*step-00000001"
        ):
            checkpoint.latest(tmp_path)


HOLDER = """
import os, pathlib, sys, time
from accelerate import Accelerator
from train.loop.checkpoint import lock_run_dir
with lock_run_dir(pathlib.Path(sys.argv[1]), Accelerator(cpu=True)):
    if os.fork():  # what is left, like a data worker, must not keep the run from going on
        print(flush=True)
    time.sleep(600)
"""


def test_a_run_folder_belongs_to_one_process_until_that_is_killed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "LOCK_TIMEOUT", 1.0)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, start_new_session=True
    )
    with holder:
        try:
            holder.stdout.readline()
            found = f"got {tmp_path} in use by process {holder.pid} on {platform.node()}"
            with (
                pytest.raises(InputError, match=f"run.folder must be free, {found}; end it"),
                checkpoint.lock_run_dir(tmp_path, Accelerator(cpu=True)),
            ):
                pass
            assert capsys.readouterr().out.count("waiting up to 1 s: ") == 1
            holder.kill()
            holder.wait()
            with checkpoint.lock_run_dir(tmp_path, Accelerator(cpu=True)):
                assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} ")
            assert not capsys.readouterr().out
        finally:
            os.killpg(holder.pid, signal.SIGKILL)


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with checkpoint.lock_run_dir(tmp_path, Accelerator(cpu=True)):
        pass
    assert "lock: No locks available; start a run only once" in capsys.readouterr().out


def test_tied_weights_are_saved_once(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    held = checkpoint.gather_state(model, torch.optim.AdamW(model.parameters()))
    path = checkpoint.save(tmp_path, 1, held, {})
    assert sorted(load_file(path / "weights.safetensors")) == ["a.bias", "a.weight", "b.bias"]


def test_another_models_checkpoint_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, 1, checkpoint.gather_state(*trained(1)), {})
    other = torch.nn.Linear(4, 4)
    with pytest.raises(InputError, match="must hold this model, got another's"):
        checkpoint.load(path, other, torch.optim.AdamW(other.parameters()))


@pytest.mark.slow
def test_sharded_models_train_and_are_saved_as_whole_ones(tmp_path):
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    script = "tests/support/sharded_training.py"
    done = command(*launch, script, tmp_path / "run", PYTHONPATH=f"{ROOT}:tests/support")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2


def test_tensors_that_are_not_sharded_are_not_copied():
    model, optimizer = trained()
    weights, moments = checkpoint.gather_state(model, optimizer)
    assert weights["0.weight"].data_ptr() == model[0].weight.data_ptr()
    state = optimizer.state[model[0].weight]
    assert {"exp_avg", "exp_avg_sq"} < state.keys()
    assert moments["0.exp_avg"].data_ptr() == state["exp_avg"].data_ptr()
    assert checkpoint.gather_state(model, optimizer, keep=False) == ({}, {})
