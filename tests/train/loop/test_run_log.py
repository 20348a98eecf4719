"""The log of a run: exact sums over restarts, throughput, warnings."""

import json
import re
import time

import pytest
import torch
from accelerate import Accelerator

from tiny import tiny_config
from train.loop.run_log import INITIAL_STATE, RunLog, Sums, step_flops, truncate_log


def test_rows_past_the_checkpoint_and_a_torn_line_are_dropped(tmp_path):
    log = tmp_path / "log.jsonl"
    rows = ['{"step": 1}', "\0" * 9, "3", '{"step": 4}', '{"step": 4, "validation_loss": 1}']
    log.write_text("\n".join([*rows, '{"step": 5}', '{"st']))  # zeros: what a power cut leaves
    truncate_log(log, 4)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 4, 4]


START = INITIAL_STATE | {"step": 0, "tokens": 100, "seconds": 50.0}
CONFIG = tiny_config()
BATCHES = ((10.0, 2, 7), (30.0, 8, 9))


def add(log, loss, predicted, length):
    batch = {"labels": torch.zeros(predicted), "attention_mask": torch.ones(1, length)}
    log.add(torch.tensor(loss), batch)


def test_a_report_is_the_mean_over_predicted_tokens_also_across_a_restart(tmp_path, monkeypatch):
    with RunLog(Accelerator(cpu=True), tmp_path, START, 2, CONFIG, 1e12) as log:
        add(log, *BATCHES[0])
        state = {"step": 0} | log.state()
    with monkeypatch.context() as patch:  # the sums are those of all processes: one has them
        patch.setattr(Accelerator, "is_main_process", False)
        with RunLog(Accelerator(cpu=True), tmp_path, state, 2, CONFIG, 1e12) as log:
            assert log.state()["pending"] == Sums()
    with RunLog(Accelerator(cpu=True), tmp_path, state, 2, CONFIG, 1e12) as log:
        add(log, *BATCHES[1])
        log.report_training(2, 0.5, torch.tensor(3.0))
        log.report_validation(2, {"validation_loss": 1.0})
    assert log.bar.postfix == "held-out loss 1.000"  # the last that a run shows
    row, validation = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert (row["loss"], row["tokens"]) == (4.0, 116)
    assert validation.pop("seconds") >= row["seconds"] >= 50
    assert validation == {"step": 2, "tokens": 116, "validation_loss": 1.0}


def test_speed_counts_training_before_a_restart_and_no_evaluation(tmp_path):
    with RunLog(Accelerator(cpu=True), tmp_path, START, 20, CONFIG, 1e12) as log:
        add(log, *BATCHES[0])
        time.sleep(0.2)  # slow steps, and no report before the end
        state = {"step": 9} | log.state()
    with RunLog(Accelerator(cpu=True), tmp_path, state, 20, CONFIG, 1e12) as log:
        add(log, *BATCHES[1])
        with log.clock.paused():
            time.sleep(1.0)
        log.report_validation(9, {"validation_loss": 1.0})
        log.report_training(10, 0.5, torch.tensor(3.0))
    evaluated, trained = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert 0.02 <= trained["seconds_per_step"] < 0.1
    assert trained["tokens_per_second"] == pytest.approx(16 / trained["seconds_per_step"] / 10, 0.1)
    assert evaluated["tokens"] == trained["tokens"] == 116
    assert trained["seconds"] >= 51.2  # of 50 before, 0.2 and 1.0; written to a hundredth


def test_a_loss_that_rises_by_more_than_a_nat_is_a_warning(tmp_path, capsys):
    with RunLog(Accelerator(cpu=True), tmp_path, START, 4, CONFIG, 1e12) as log:
        for step, loss in enumerate((9.0, 3.0, 3.9, 5.0), start=1):
            add(log, 10 * loss, 10, 7)
            log.report_training(step, 0.5, torch.tensor(3.0))
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert [line.strip() for line in lines] == ["warning: the loss rose from 3.90 to 5.00 at 4"]


@pytest.mark.parametrize("lost", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_is_left_out_and_the_next_spike_is_seen(lost, tmp_path, capsys):
    micro_batches = [[(30.0, 10), (lost, 90)], [(lost, 90)], [(50.0, 10)]]
    with RunLog(Accelerator(cpu=True), tmp_path, START, 3, CONFIG, 1e12) as log:
        for step, parts in enumerate(micro_batches, start=1):
            for loss, predicted in parts:
                add(log, loss, predicted, 7)
            log.report_training(step, 0.5, torch.tensor(lost if step == 2 else 3.0))
    text = (tmp_path / "log.jsonl").read_text()
    assert not re.search("NaN|Infinity", text)  # which are no JSON
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row.get("loss") for row in rows] == [3.0, None, 5.0]
    assert [row.get("gradient_norm") for row in rows] == [3.0, None, 3.0]
    assert [row["tokens"] for row in rows] == [114, 121, 128]  # they were read all the same
    assert "warning: the loss rose from 3.00 to 5.00 at 3" in capsys.readouterr().err


@pytest.mark.parametrize("processes", [1, 4])
def test_the_mfu_is_of_all_processes_and_of_pairs_in_a_sequence(processes, tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "num_processes", processes)
    batch = {"labels": torch.zeros(30), "attention_mask": torch.ones(2, 50)}
    with RunLog(Accelerator(cpu=True), tmp_path, START, 1, CONFIG, 1e6) as log:
        log.add(torch.tensor(9.0), batch)
        log.report_training(1, 0.5, torch.tensor(3.0))
    row = json.loads((tmp_path / "log.jsonl").read_text())
    operations = row["mfu"] * 1e6 * processes / row["tokens_per_second"]
    assert operations == pytest.approx(step_flops(CONFIG, 100, 2 * 50**2, 30) / 100, rel=1e-3)
