"""The scripts of configs/sweeps, with programs that only write down how they were called."""

import os
import subprocess

import pytest

from roformer.configuration_roformer import POSITION_ENCODINGS
from tiny import ROOT
from train.command_line import parse_settings
from train.settings import PretrainSettings

ACCELERATE = """#!/usr/bin/env bash
echo "$OMP_NUM_THREADS"
[[ " $* " != *" a-0 "* ]] || exit 3
printf '%s\\n' "$@" > "$(mktemp "$CALLS/XXXXXX")"
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """A function that runs a script in a copy and returns it, with the calls of `accelerate`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "calls").mkdir()
    for name, text in (("accelerate", ACCELERATE), ("python", "#!/bin/sh\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"

    def run(script, *arguments, runs=""):
        environment = os.environ | {"PATH": path, "CALLS": "calls", "OMP_NUM_THREADS": "4"}
        command = [tmp_path / "configs" / "sweeps" / script, *arguments]
        done = subprocess.run(command, input=runs, env=environment, capture_output=True, text=True)
        return done, [file.read_text().splitlines() for file in (tmp_path / "calls").iterdir()]

    return run


@pytest.mark.parametrize(
    ("script", "scale", "names"),
    [
        ("encodings", "small", 3 * len(POSITION_ENCODINGS)), ("encodings", "tiny", 2 * 2),
        ("performer", "small", 3 * 2), ("performer", "tiny", 3),
        ("pair", "small", 2 * 2), ("pair", "tiny", 2 * 2),
    ],
)  # fmt: skip
def test_every_sweep_gives_settings_that_pretraining_accepts(script, scale, names, sweep):
    glue = ["glue"] if script == "pair" else []
    done, calls = sweep(f"{script}.sh", scale, *glue, "a", "b")
    assert done.returncode == 0, done.stderr
    calls = [call for call in calls if "train/pretrain.py" in call]
    assert all("configs/accelerate/cpu.yaml" in call for call in calls)
    flags = [call[call.index("train/pretrain.py") + 1 :] for call in calls]
    found = [parse_settings(PretrainSettings, given) for given in flags]
    assert len({settings.run.name for settings in found}) == len(found) == names
    for settings in found:
        variant, seed = settings.run.name.rsplit("-", 1)
        assert settings.run.folder == f"runs/{script}-{scale}"
        assert settings.run.seed == int(seed)
        assert settings.corpus.train == ["a/train*", "b/train*"]
        assert settings.corpus.validation == "a/validation*"
        if script == "pair":
            assert settings.model.type == variant
        else:
            encoding = variant.split("_")[-1] if script == "performer" else variant
            assert settings.model.config["position_encoding"] == encoding
        if script == "performer":
            features = {"favor": "favor", "softmax": None}[variant.split("_")[0]]
            assert settings.model.config.get("linear_attention") == features


def test_finished_runs_are_skipped_and_a_failed_one_does_not_stop_the_others(sweep, tmp_path):
    model = tmp_path / "runs" / "pair-tiny" / "done-0" / "model"
    model.mkdir(parents=True)
    (model / "tokenizer_config.json").touch()
    runs = "".join(f"{name} --run.seed 0\n" for name in ("a-0", "done-0", "b-0", "c-0"))
    done, calls = sweep("runs.sh", "pair-tiny", runs=runs)
    assert done.returncode != 0
    assert "a-0: failed" in done.stdout
    assert sorted(call[call.index("--run.name") + 1] for call in calls) == ["b-0", "c-0"]
    embedded = ["--corpus.train", "embedded", "--corpus.validation", "embedded"]
    assert all(call[-4:] == embedded for call in calls)
    assert (model.parents[1] / "b-0.log").read_text() == "2\n"  # of four threads, two runs at once


def test_a_sweep_that_is_not_tiny_needs_text(sweep):
    done, calls = sweep("encodings.sh", "small")
    assert done.returncode != 0
    assert "must be folders of text" in done.stderr
    assert not calls
