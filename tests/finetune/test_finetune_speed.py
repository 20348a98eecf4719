"""The fine-tuning benchmark: rows, padding, and the whole command."""

import json
import re

import numpy as np

from finetune import speed
from finetune.data import load_examples
from finetune.speed import BenchSettings
from finetune.tasks import TASKS
from tiny_glue import tiny_model, tiny_tokenizer, write_sst2, write_stsb


def examples(folder):
    write_stsb(folder)
    cache = str(folder / "tokens")
    return load_examples(TASKS["stsb"], "train", str(folder), tiny_tokenizer(), 32, cache)


def test_the_first_rows_are_the_first_rows(tmp_path):
    every = examples(tmp_path)
    few = speed.first_rows(every, 7)
    assert len(few) == 7
    rows = np.array([6, 0, 3])
    both = few.batch(rows), every.batch(rows)
    assert all(a.equal(b) for a, b in zip(*(batch.values() for batch in both)))
    assert len(speed.first_rows(every, 0)) == len(every)


def test_the_examples_rows_are_the_tokenizers(tmp_path):
    every = examples(tmp_path)
    padded = tiny_tokenizer().pad(speed.to_features(every)[3:6], return_tensors="pt")
    assert all(padded[name].equal(value) for name, value in every.batch(np.arange(3, 6)).items())


def test_every_loop_has_its_turns(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny_model(tmp_path / "model", "bert")
    glue = write_sst2(tmp_path / "glue", train=64)
    output = str(tmp_path / "speed.json")
    settings = BenchSettings(model, glue, tasks=["sst2"], rounds=2, length=32, output=output)
    speed.main(settings)
    seconds = json.loads((tmp_path / "speed.json").read_text())["seconds"]["sst2"]
    assert len(seconds) == 5
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
    table = (tmp_path / "speed.md").read_text()
    assert table[table.index("| task") :] in capsys.readouterr().out
    assert "commit" in table[: table.index("| task")]
    assert re.search(r"\| sst2, 64 +\| +this project, bf16 \|", table)
