"""Sweeps: the commands of a grid, runs that are skipped, continued, failed or interrupted."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tiny import ROOT
from train.command_line import parse_settings
from train.settings import InputError, PretrainSettings
from train.sweep import SweepSettings, main, pretrain_commands, run_commands

SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
PRETRAIN = str(ROOT / "configs" / "pretrain" / "demo.yaml")
FINISHED = "from pathlib import Path; Path({!r}).mkdir(parents=True); Path({!r}).touch()"


def finishing(folder, name):
    model = folder / name / "model"
    code = FINISHED.format(str(model), str(model / "tokenizer_config.json"))
    return [sys.executable, "-c", code]


@pytest.fixture
def text(tmp_path):
    for name in ("a/train-1.txt", "a/train-0.txt", "a/validation.txt", "b/train.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_shipped_sweep_gives_settings_that_pretraining_accepts(path, monkeypatch, text):
    monkeypatch.chdir(ROOT)
    settings = parse_settings(
        SweepSettings, ["--config", str(path), "--text", f"[{', '.join(text)}]"]
    )
    commands = pretrain_commands(settings)
    assert len(commands) == len(settings.variants) * len(settings.seeds)
    for name, command in commands.items():
        flags = command[command.index(str(ROOT / "train" / "pretrain.py")) + 1 :]
        run = parse_settings(PretrainSettings, flags)
        variant, seed = name.rsplit("-", 1)
        assert (run.run.folder, run.run.name) == (f"runs/{path.stem}", name)
        assert run.run.seed == int(seed)
        files = ["a/train-0.txt", "a/train-1.txt", "b/train.txt"]
        assert [x.removeprefix(text[0][:-1]) for x in run.corpus.train] == files
        assert run.corpus.validation == [f"{text[0]}/validation.txt"]
        if "pair" in path.stem:
            assert run.model.type == variant
        else:
            encoding = variant.split("_")[-1] if "performer" in path.stem else variant
            assert run.model.config["position_encoding"] == encoding
        if "performer" in path.stem:
            features = {"favor": "favor", "softmax": None}[variant.split("_")[0]]
            assert run.model.config["linear_attention"] == features


def test_finished_runs_are_skipped_and_embedded_text_is_passed_on(tmp_path, capsys):
    subprocess.run(finishing(tmp_path, "a-0"), check=True)
    variants = {"a": "--model.type bert", "b": ""}
    main(SweepSettings(PRETRAIN, variants, str(tmp_path), ["embedded"], dry=True))
    first, command = capsys.readouterr().out.splitlines()
    assert first.startswith("1 of 2 runs")
    assert "--run.name b-0" in command
    assert command.endswith("--corpus.train embedded --corpus.validation embedded")


def test_a_failed_run_fails_the_sweep_after_the_others(tmp_path, monkeypatch, capsys):
    tmp_path = tmp_path / "new" / "folder"
    commands = {
        "failing-0": [sys.executable, "-c", "print('why'); raise SystemExit(3)"],
        "stopped-0": [sys.executable, "-c", ""],  # ends with 0 at run.max_hours, without a model
        "good-0": finishing(tmp_path, "good-0"),
    }
    monkeypatch.setattr("train.sweep.pretrain_commands", lambda settings: commands)
    with pytest.raises(InputError, match=r"sweep must finish .* got 2 "):
        main(SweepSettings("x.yaml", {}, str(tmp_path), ["embedded"]))
    assert (tmp_path / "failing-0.log").read_text() == "why\n"
    printed = capsys.readouterr().out
    assert "failing-0: not finished (exit code 3)" in printed
    assert "good-0: finished" in printed


def test_workers_run_at_the_same_time_and_share_the_threads(tmp_path, monkeypatch):
    wait = (
        "import os, sys, time; from pathlib import Path; here, other = map(Path, sys.argv[1:]);"
        "here.touch(); end = time.monotonic() + 60\n"
        "while not other.exists() and time.monotonic() < end: time.sleep(0.01)\n"
        "print(other.exists(), os.environ['OMP_NUM_THREADS'])"
    )
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    commands = {"x": [sys.executable, "-c", wait, a, b], "y": [sys.executable, "-c", wait, b, a]}
    run_commands(commands, tmp_path, 2)
    assert (tmp_path / "x.log").read_text() == (tmp_path / "y.log").read_text() == "True 2\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_terminates_its_runs_and_starts_no_other(tmp_path, number):
    waiting = [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(600)"]
    log, end = tmp_path / "a.log", time.monotonic() + 120

    def interrupt():
        while not (log.exists() and log.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored, as under `nohup`
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(InputError, match="sweep must run to its end, got an interrupt"):
            run_commands(dict.fromkeys(("a", "b"), waiting), tmp_path, 1)
    finally:
        thread.join()
        for n, handler in handlers.items():
            signal.signal(n, handler)
    assert not (tmp_path / "b.log").exists()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"workers": 0}, "workers must"),
        ({"pretrain": "nowhere.yaml"}, "File does not exist"),
        ({"variants": {"a": "--optim.learning_rat 1"}}, "did you mean optim.learning_rate"),
        ({"text": []}, "text must"),
        ({"text": ["nowhere"]}, r"text must hold train\*"),
        ({"text": ["TMP/b"]}, r"text must hold validation\*"),
    ],
)
def test_impossible_settings_are_refused(tmp_path, text, changes, match):
    values = {"pretrain": PRETRAIN, "variants": {"a": ""}, "folder": "runs", "text": text}
    values |= changes
    values["text"] = [folder.replace("TMP", str(tmp_path)) for folder in values["text"]]
    with pytest.raises(InputError, match=match):
        pretrain_commands(SweepSettings(**values))
