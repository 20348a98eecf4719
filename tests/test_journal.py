"""The log of a run: what a killed run wrote past its checkpoint goes, the rest stays."""

import json

import torch
from accelerate import Accelerator

from conftest import TINY_MODEL
from roformer import RoFormerConfig
from train.journal import Journal, environment, forget_after


def test_rows_past_the_checkpoint_and_a_torn_line_are_dropped(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1}\n{"step": 4}\n{"step": 4, "validation_loss": 1}\n{"step": 5}\n{"st')
    forget_after(log, 4)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 4, 4]


START = {"step": 0, "tokens": 100, "seconds": 50.0, "pending": [0.0] * 5}
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


def test_the_environment_says_what_a_number_needs_beside_it():
    found = environment(Accelerator(cpu=True))
    assert found["torch"] == torch.__version__
    assert found["commit"] != "unknown"
    assert found["machine"]
