"""The log of a run: what a killed run wrote past its checkpoint goes, the rest stays."""

import json
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from conftest import TINY_MODEL
from roformer import RoFormerConfig
from train.journal import (
    NOTHING,
    Journal,
    changed_settings,
    environment,
    forget_after,
    write_header,
)
from train.settings import InputError, OptimSettings, PretrainSettings


def test_rows_past_the_checkpoint_and_a_torn_line_are_dropped(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1}\n{"step": 4}\n{"step": 4, "validation_loss": 1}\n{"step": 5}\n{"st')
    forget_after(log, 4)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 4, 4]


START = NOTHING | {"step": 0, "tokens": 100, "seconds": 50.0}
CONFIG = RoFormerConfig(vocab_size=60, **TINY_MODEL)
BATCHES = ((10.0, 2, 7), (30.0, 8, 9))


def add(journal, loss, predicted, length):
    batch = {"targets": torch.zeros(predicted), "attention_mask": torch.ones(1, length)}
    journal.add(torch.tensor(loss), torch.tensor(1), batch)


def test_what_was_counted_since_the_last_report_survives_a_restart(tmp_path):
    accelerator = Accelerator(cpu=True)
    with Journal(accelerator, tmp_path, START, 2, CONFIG, 1e12) as journal:
        add(journal, *BATCHES[0])
        state = {"step": 0} | journal.state()
    with Journal(accelerator, tmp_path, state, 2, CONFIG, 1e12) as journal:
        add(journal, *BATCHES[1])
        journal.training(2, 0.5, torch.tensor(3.0))
    row = json.loads((tmp_path / "log.jsonl").read_text())
    assert (row["loss"], row["accuracy"], row["tokens"]) == (4.0, 0.2, 116)


def test_speed_counts_training_before_a_restart_and_no_evaluation(tmp_path):
    accelerator = Accelerator(cpu=True)
    with Journal(accelerator, tmp_path, START, 20, CONFIG, 1e12) as journal:
        add(journal, *BATCHES[0])
        time.sleep(0.2)  # slow steps, and no report before the end
        state = {"step": 9} | journal.state()
    with Journal(accelerator, tmp_path, state, 20, CONFIG, 1e12) as journal:
        add(journal, *BATCHES[1])
        with journal.clock.paused():
            time.sleep(1.0)
        journal.validation(9, {"validation_loss": 1.0})
        journal.training(10, 0.5, torch.tensor(3.0))
    evaluated, trained = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert 0.02 <= trained["seconds_per_step"] < 0.1
    assert trained["tokens_per_second"] == pytest.approx(16 / trained["seconds_per_step"] / 10, 0.1)
    assert evaluated["tokens"] == trained["tokens"] == 116
    assert trained["seconds"] >= 51.2  # of 50 before, 0.2 and 1.0; written to a hundredth


def test_a_report_is_the_mean_over_predicted_tokens_not_over_batches(tmp_path):
    accelerator = Accelerator(cpu=True)
    with Journal(accelerator, tmp_path, START, 2, CONFIG, 1e12) as journal:
        for loss, predicted, length in BATCHES:
            add(journal, loss, predicted, length)
        journal.training(2, 0.5, torch.tensor(3.0))
        journal.validation(2, {"validation_loss": 1.0})
    first, second = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert (first["loss"], first["accuracy"], first["tokens"]) == (4.0, 0.2, 116)
    assert first["seconds"] >= 50
    assert second == {
        "step": 2,
        "tokens": 116,
        "seconds": second["seconds"],
        "validation_loss": 1.0,
    }


def test_a_loss_that_rises_by_more_than_a_nat_is_a_warning(tmp_path, capsys):
    with Journal(Accelerator(cpu=True), tmp_path, START, 4, CONFIG, 1e12) as journal:
        for step, loss in enumerate((9.0, 3.0, 3.9, 5.0), start=1):
            add(journal, 10 * loss, 10, 7)
            journal.training(step, 0.5, torch.tensor(3.0))
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert [line.strip() for line in lines] == ["warning: the loss rose from 3.90 to 5.00 at 4"]


def started(tmp_path, **optim):
    folder, settings = tmp_path / "run", PretrainSettings(OptimSettings(steps=9, **optim))
    folder.mkdir(exist_ok=True)
    return folder, settings, Accelerator(cpu=True)


def test_a_kill_while_settings_change_leaves_the_old_ones(tmp_path, monkeypatch):
    folder, settings, accelerator = started(tmp_path)
    write_header(folder, settings, accelerator, 0, 7, {})
    assert json.loads((folder / "environment.json").read_text())["parameters"] == 7
    before = (folder / "settings.yaml").read_text()
    _, other, _ = started(tmp_path, learning_rate=0.5)
    assert changed_settings(folder, other) == {"optim.learning_rate": (1e-3, 0.5)}

    def killed(path, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_header(folder, other, accelerator, 7, 7, changed_settings(folder, other))
    assert (folder / "settings.yaml").read_text() == before
    write_header(folder, other, accelerator, 7, 7, changed_settings(folder, other))
    assert not changed_settings(folder, other)


@pytest.mark.parametrize("torn", ["", "optim: {", "[1]", "\x00"])
def test_settings_that_cannot_be_read_are_named(torn, tmp_path):
    folder, settings, _ = started(tmp_path)
    (folder / "settings.yaml").write_text(torn)
    with pytest.raises(InputError, match="settings.yaml must hold the settings of the run, got"):
        changed_settings(folder, settings)


def test_the_environment_says_what_a_number_needs_beside_it():
    found = environment(Accelerator(cpu=True))
    assert found["torch"] == torch.__version__
    assert found["commit"] != "unknown"
    assert found["machine"]
