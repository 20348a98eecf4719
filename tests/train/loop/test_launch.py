"""The precision of a launch on a CPU without bfloat16 instructions, and the commit it runs."""

import os
import subprocess
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from roformer.kernels.conditions import bfloat16_is_emulated
from train.loop import launch
from train.loop.launch import replace_emulated_bfloat16
from train.settings import InputError


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, "no"),
        ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, "bf16"),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}, "bf16"),
        ({"architecture": "arm64", "bf16": True}, "bf16"),
        ({"architecture": "arm64", "bf16": False}, "no"),
        ({}, "bf16"),  # of a torch that does not tell
    ],
)
def test_a_cpu_without_bfloat16_computes_in_float32(monkeypatch, capsys, capabilities, precision):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    bfloat16_is_emulated.cache_clear()
    replace_emulated_bfloat16()
    bfloat16_is_emulated.cache_clear()
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == precision
    assert ("float32" in capsys.readouterr().out) == (precision == "no")


@pytest.mark.parametrize(
    ("kind", "is_fsdp2", "key"),
    [
        ("DEEPSPEED", False, "launch must be .* got DEEPSPEED"),
        ("FSDP", False, "launch must be .* got fsdp_version: 1"),
        ("FSDP", True, "fsdp_activation_checkpointing must be false"),
    ],
)
def test_a_distribution_whose_weights_would_not_be_saved_is_refused(kind, is_fsdp2, key):
    plugin = SimpleNamespace(activation_checkpointing=True)
    accelerator = SimpleNamespace(
        distributed_type=DistributedType(kind), is_fsdp2=is_fsdp2, num_processes=1,
        device=torch.device("cpu"), state=SimpleNamespace(fsdp_plugin=plugin),
    )  # fmt: skip
    with pytest.raises(InputError, match=key):
        launch._check_launch(accelerator)


def test_gradients_are_not_divided_by_a_number_in_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert launch.start_accelerator().gradient_accumulation_steps == 1


def test_the_commit_is_dirty_by_code_and_not_by_what_runs_write(tmp_path, monkeypatch):
    for name in ("roformer", "train", "finetune", "configs", "results"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("committed")
    one = ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"]
    for command in (["init", "-q"], ["add", "."], one):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    file = tmp_path / "train" / "loop" / "launch.py"
    monkeypatch.setattr(launch, "__file__", str(file))
    clean = launch.git_commit.__wrapped__()
    assert len(clean) == 12
    (tmp_path / "results" / "file").write_text("another line")
    assert launch.git_commit.__wrapped__() == clean
    (tmp_path / "finetune" / "file").write_text("changed")
    assert launch.git_commit.__wrapped__() == f"{clean}-dirty"
