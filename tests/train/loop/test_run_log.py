"""The log of a run: what a killed run wrote past its checkpoint goes, the rest stays."""

import dataclasses
import json
import math
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from roformer import RoFormerConfig
from tiny import TINY_MODEL
from train.loop import run_log
from train.loop.flops import step_flops
from train.loop.run_log import (
    INITIAL_STATE,
    RunLog,
    changed_settings,
    check_settings_unchanged,
    collect_environment,
    truncate_log,
    write_header,
)
from train.settings import InputError, OptimSettings, PretrainSettings, RunSettings


def test_rows_past_the_checkpoint_and_a_torn_line_are_dropped(tmp_path):
    log = tmp_path / "log.jsonl"
    rows = ['{"step": 1}', "\0" * 9, "[]", '{"step": 4}', '{"step": 4, "validation_loss": 1}']
    log.write_text("\n".join([*rows, '{"step": 5}', '{"st']))  # zeros: what a power cut leaves
    truncate_log(log, 4)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 4, 4]


START = INITIAL_STATE | {"step": 0, "tokens": 100, "seconds": 50.0}
CONFIG = RoFormerConfig(vocab_size=60, **TINY_MODEL)
BATCHES = ((10.0, 2, 7), (30.0, 8, 9))


def add(journal, loss, predicted, length):
    batch = {"labels": torch.zeros(predicted), "attention_mask": torch.ones(1, length)}
    journal.add(torch.tensor(loss), torch.tensor(1), batch)


def test_what_was_counted_since_the_last_report_survives_a_restart(tmp_path):
    accelerator = Accelerator(cpu=True)
    with RunLog(accelerator, tmp_path, START, 2, CONFIG, 1e12) as journal:
        add(journal, *BATCHES[0])
        state = {"step": 0} | journal.state(0)
    with RunLog(accelerator, tmp_path, state, 2, CONFIG, 1e12) as journal:
        add(journal, *BATCHES[1])
        journal.training(2, 0.5, torch.tensor(3.0))
    row = json.loads((tmp_path / "log.jsonl").read_text())
    assert (row["loss"], row["accuracy"], row["tokens"]) == (4.0, 0.2, 116)


def test_a_checkpoint_has_the_loss_measured_at_its_own_step_or_none(tmp_path):
    with RunLog(Accelerator(cpu=True), tmp_path, START, 20, CONFIG, 1e12) as journal:
        assert journal.state(0)["validation_loss"] is None
        journal.validation(5, {"validation_loss": 1.5})
        assert journal.state(5)["validation_loss"] == 1.5
        assert journal.state(6)["validation_loss"] is None
        journal.validation(8, {"validation_loss": math.nan})
        assert journal.state(8)["validation_loss"] is None


def test_speed_counts_training_before_a_restart_and_no_evaluation(tmp_path):
    accelerator = Accelerator(cpu=True)
    with RunLog(accelerator, tmp_path, START, 20, CONFIG, 1e12) as journal:
        add(journal, *BATCHES[0])
        time.sleep(0.2)  # slow steps, and no report before the end
        state = {"step": 9} | journal.state(9)
    with RunLog(accelerator, tmp_path, state, 20, CONFIG, 1e12) as journal:
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
    with RunLog(accelerator, tmp_path, START, 2, CONFIG, 1e12) as journal:
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
    with RunLog(Accelerator(cpu=True), tmp_path, START, 4, CONFIG, 1e12) as journal:
        for step, loss in enumerate((9.0, 3.0, 3.9, 5.0), start=1):
            add(journal, 10 * loss, 10, 7)
            journal.training(step, 0.5, torch.tensor(3.0))
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert [line.strip() for line in lines] == ["warning: the loss rose from 3.90 to 5.00 at 4"]


@pytest.mark.parametrize("lost", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_is_left_out_and_the_next_spike_is_seen(lost, tmp_path, capsys):
    micro_batches = [[(30.0, 10), (lost, 90)], [(lost, 90)], [(50.0, 10)]]
    with RunLog(Accelerator(cpu=True), tmp_path, START, 3, CONFIG, 1e12) as journal:
        for step, parts in enumerate(micro_batches, start=1):
            for loss, predicted in parts:
                add(journal, loss, predicted, 7)
            journal.training(step, 0.5, torch.tensor(lost if step == 2 else 3.0))

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [row.get("loss") for row in rows] == [3.0, None, 5.0]
    assert [row.get("accuracy") for row in rows] == [0.1, None, 0.1]  # one of ten is right
    assert [row.get("gradient_norm") for row in rows] == [3.0, None, 3.0]
    assert [row["tokens"] for row in rows] == [114, 121, 128]  # they were read all the same
    assert "warning: the loss rose from 3.00 to 5.00 at 3" in capsys.readouterr().err


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
    assert changed_settings(folder, other, "no") == {"optim.learning_rate": (1e-3, 0.5)}

    def killed(path, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_header(folder, other, accelerator, 7, 7, changed_settings(folder, other, "no"))
    assert (folder / "settings.yaml").read_text() == before
    write_header(folder, other, accelerator, 7, 7, changed_settings(folder, other, "no"))
    assert not changed_settings(folder, other, "no")


def test_another_precision_is_refused_and_noted_where_it_may_be(tmp_path):
    folder, settings, accelerator = started(tmp_path)
    write_header(folder, settings, accelerator, 0, 7, {})
    with pytest.raises(
        InputError, match="mixed_precision must stay 'no' for the run in .*, got 'bf16'; choose an"
    ):
        check_settings_unchanged(folder, settings, "bf16")
    drifting = dataclasses.replace(settings, run=RunSettings(allow_drift=True))
    check_settings_unchanged(folder, drifting, "bf16")
    changed = changed_settings(folder, settings, "bf16")
    other = SimpleNamespace(mixed_precision="bf16")
    write_header(folder, settings, other, 7, 7, changed)
    note = "# run.allow_drift changed after step 7: mixed_precision from 'no' to 'bf16'"
    assert (folder / "settings.yaml").read_text().splitlines()[0] == note
    check_settings_unchanged(folder, settings, "bf16")  # from now on it is the run's
    assert changed_settings(folder, settings, "no") == {"mixed_precision": ("bf16", "no")}
    about = json.loads((folder / "environment.json").read_text())
    assert (about["precision"], about["parameters"]) == ("bf16", 7)
    for earlier in ("{}", None):  # a run that does not say goes on
        (folder / "environment.json").unlink()
        if earlier is not None:
            (folder / "environment.json").write_text(earlier)
        assert not changed_settings(folder, settings, "no")


def test_an_environment_that_was_deleted_is_written_again(tmp_path):
    """As the message about a broken one says; publishing a run needs it."""
    folder, settings, accelerator = started(tmp_path)
    write_header(folder, settings, accelerator, 0, 7, {})
    before = (folder / "settings.yaml").read_text()
    (folder / "environment.json").unlink()
    write_header(folder, settings, accelerator, 5, 7, {})
    assert json.loads((folder / "environment.json").read_text())["parameters"] == 7
    assert (folder / "settings.yaml").read_text() == before


def test_a_run_goes_on_under_another_name_of_its_folder(tmp_path):
    folder, settings, accelerator = started(tmp_path)
    write_header(folder, settings, accelerator, 0, 7, {})
    check_settings_unchanged(folder, dataclasses.replace(settings, run=RunSettings(name="x")), "no")


@pytest.mark.parametrize("torn", ["", "optim: {", "[1]", "\x00"])
def test_settings_that_cannot_be_read_are_named(torn, tmp_path):
    folder, settings, _ = started(tmp_path)
    (folder / "settings.yaml").write_text(torn)
    with pytest.raises(InputError, match="settings.yaml must hold the settings of the run, got"):
        changed_settings(folder, settings, "no")


def test_the_environment_says_what_a_number_needs_beside_it():
    found = collect_environment(Accelerator(cpu=True))
    assert found["torch"] == torch.__version__
    assert found["commit"] != "unknown"
    assert found["machine"]


def test_the_commit_is_dirty_by_code_and_not_by_what_runs_write(tmp_path, monkeypatch):
    for name in ("roformer", "train", "finetune", "configs", "results"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("committed")
    one = ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"]
    for command in (["init", "-q"], ["add", "."], one):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    monkeypatch.setattr(run_log, "__file__", str(tmp_path / "train" / "loop" / "journal.py"))
    clean = run_log.git_commit.__wrapped__()
    assert len(clean) == 12
    (tmp_path / "results" / "file").write_text("another line")
    assert run_log.git_commit.__wrapped__() == clean
    (tmp_path / "finetune" / "file").write_text("changed")
    assert run_log.git_commit.__wrapped__() == f"{clean}-dirty"


@pytest.mark.parametrize("processes", [1, 4])
def test_the_share_of_the_peak_is_of_all_processes_and_of_pairs_in_a_sequence(
    processes, tmp_path, monkeypatch
):
    monkeypatch.setattr(Accelerator, "num_processes", processes)
    batch = {"labels": torch.zeros(30), "attention_mask": torch.ones(2, 50)}
    with RunLog(Accelerator(cpu=True), tmp_path, START, 1, CONFIG, 1e6) as journal:
        journal.add(torch.tensor(9.0), torch.tensor(1), batch)
        journal.training(1, 0.5, torch.tensor(3.0))
    row = json.loads((tmp_path / "log.jsonl").read_text())
    operations = row["mfu"] * 1e6 * processes / row["tokens_per_second"]
    assert operations == pytest.approx(step_flops(CONFIG, 100, 2 * 50**2, 30) / 100, rel=1e-3)
