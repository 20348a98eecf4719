"""The precision of a launch on a CPU without bfloat16 instructions, and the commit it runs."""

import os
import subprocess

import pytest
import torch

from roformer.kernels.conditions import bfloat16_is_emulated
from train.loop import launch
from train.loop.launch import replace_emulated_bfloat16


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
