"""The benchmark: alternating rounds, equal losses, ratios, and the whole command at tiny size."""

import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from transformers import Trainer

from tiny import command, refused
from train.bench import baselines, parts
from train.bench.__main__ import main
from train.bench.baselines import DEFAULT, SPARSE, STEPS, STOCK, Workload, time_models
from train.bench.parts import Benchmark, BenchSettings


def tiny(tmp_path, **changes):
    return BenchSettings(scale="tiny", rounds=2, output=str(tmp_path / "speed.json"), **changes)


def test_models_alternate_and_the_first_turn_is_dropped(monkeypatch):
    calls = []
    monkeypatch.setitem(STEPS, "named", lambda name, workload: lambda: calls.append(name))
    seconds = time_models("named", ["a", "b"], Workload(), 2)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert [len(values) for values in seconds.values()] == [2, 2]


def test_ratios_are_taken_within_a_turn(tmp_path, monkeypatch):
    times = {STOCK: [4.0, 9.0, 1.0], DEFAULT: [2.0, 3.0, 1.0]}
    monkeypatch.setattr(Benchmark, "time", lambda *arguments: times)
    benchmark = Benchmark(tiny(tmp_path))
    benchmark.compare("training", Workload(), [DEFAULT])
    (row,) = benchmark.rows
    assert (row["value"], row["low"], row["high"]) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize("padded", [False, True])
def test_every_model_computes_the_same_loss_on_the_same_tokens(padded, monkeypatch):
    """With all weights 0 every loss is ln V, whatever the model: tokens are counted alike."""
    workload = Workload("tiny", 3, 40, dropout=0.0, padded=padded)
    batch = baselines.random_batch(workload)
    labelled = batch["labels"] >= 0
    packed = baselines.packed_batch(workload)
    assert int(batch["attention_mask"].sum()) == packed["input_ids"].numel() == workload.tokens
    assert packed["labels"].equal(batch["labels"][labelled])
    predicted = packed["input_ids"][0, packed["label_indices"]]
    assert predicted.equal(batch["input_ids"][labelled])

    def with_zeros(model, *rest):
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        return torch.optim.SGD(model.parameters())

    monkeypatch.setattr(baselines, "adamw", with_zeros)
    losses = []
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: losses.append(loss.item()))
    others = (STOCK, baselines.BERT, baselines.MODERN, DEFAULT, SPARSE, *baselines.LINEAR)
    for name in (baselines.OURS, *others):
        baselines.make_training_step(name, workload)()
    assert losses == pytest.approx([math.log(30522)] * (1 + len(others)), rel=1e-5)


def test_wrong_settings_are_refused(tmp_path):
    for key, value, found in (
        ("parts", ["peak", "speed"], "got speed"),
        ("output", "speed.md", "got speed.md"),
        ("output", "/dev/null/speed.json", "got /dev/null"),
    ):
        given = {"output": str(tmp_path / "x.json"), key: value}
        refused(lambda given=given: main(BenchSettings(**given)), key, found)


@pytest.mark.slow
def test_all_tables_are_written(tmp_path):
    main(tiny(tmp_path))
    written = json.loads((tmp_path / "speed.json").read_text())
    assert list(written["parts"]) == list(parts.PARTS["cpu"])


def test_a_part_measured_alone_replaces_its_rows_and_keeps_the_others(tmp_path):
    for part, rounds in (("peak", 2), ("long_text", 2), ("peak", 3)):
        main(replace(tiny(tmp_path), parts=[part], rounds=rounds))
    written = json.loads((tmp_path / "speed.json").read_text())
    assert len(written["parts"]["peak"]["rows"]) == 2
    page = (tmp_path / "speed.md").read_text()
    measured = (("peak", 3), ("long_text", 2))
    for (name, rounds), section in zip(measured, page.split("## ")[1:], strict=True):
        machine = written["parts"][name]["machine"]
        assert section.startswith(name)
        assert f"machine {machine}, " in section  # its own, should another one measure the rest
        assert f"medians of {rounds} turns" in section


def test_every_cell_of_default_options_is_measured_and_each_task_has_a_mean(tmp_path, monkeypatch):
    """With invented times: a half of transformers' by default, a fifth with sparse_prediction."""
    times = {STOCK: [1.0, 1.0], DEFAULT: [0.5, 0.5], SPARSE: [0.2, 0.2]}
    monkeypatch.setattr(Benchmark, "time", lambda *arguments: times)
    benchmark = Benchmark(replace(tiny(tmp_path), scale="full"))
    parts.defaults(benchmark)
    # 3 shapes in 2 precisions, with padding and without, and the mean of the 12
    assert len({row["case"] for row in benchmark.rows}) == 3 * 13
    found = Counter((row["case"].split(",")[0], row["model"]) for row in benchmark.rows)
    tasks = ("inference", "inference with logits", "training")
    assert found == {(task, DEFAULT): 13 for task in tasks} | {("training", SPARSE): 13}
    for row in benchmark.rows:
        assert row["value"] == pytest.approx(5 if row["model"] == SPARSE else 2)


@pytest.mark.parametrize(("task", "steps"), [("pretraining", 3), ("classification", 10)])
def test_trainer_gets_the_same_rows_for_both_models_and_no_option(task, steps, monkeypatch):
    trainers = []
    monkeypatch.setattr(Trainer, "train", lambda self: trainers.append(self))
    for name in (STOCK, DEFAULT, SPARSE):
        STEPS[task](name, Workload("tiny", 2, 32))()
    packages = [type(x.model).__module__.split(".")[0] for x in trainers]
    assert packages == ["transformers", "roformer", "roformer"]
    assert len({json.dumps(x.train_dataset) for x in trainers}) == 1
    assert {x.args.max_steps * x.args.train_batch_size for x in trainers} == {2 * steps}
    sparse = [getattr(x.model.config, "sparse_prediction", False) for x in trainers]
    assert sparse == [False, False, True]


def test_datasets_evaluate_and_matplotlib_are_not_needed(tmp_path):
    """A machine with a GPU may have what torch needs, and little more."""
    without = "sys.modules |= dict.fromkeys(('datasets', 'evaluate', 'matplotlib'))"
    start = "runpy.run_module('train.bench', run_name='__main__')"
    code = f"import runpy, sys; {without}; {start}"
    flags = ("--scale=tiny", "--rounds=2", "--parts=[peak]")
    command("-c", code, *flags, f"--output={tmp_path / 'speed.json'}")
    assert (tmp_path / "speed.md").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path, monkeypatch):
    """Traced as compilation does, without machine code: faults show before a GPU is used."""
    trace = Mock(wraps=partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(torch, "compile", trace)
    monkeypatch.setattr(Benchmark, "time", lambda self, *x: time_models(*x, turns=1))
    benchmark = Benchmark(tiny(tmp_path))
    for part in parts.PARTS["cuda"].values():
        part(benchmark)
    compiled = Counter(type(call.args[0]).__name__ for call in trace.call_args_list)
    # two layers in each of five shapes, and another model
    assert (compiled["RoFormerLayer"], compiled["BertForMaskedLM"]) == (10, 1)
