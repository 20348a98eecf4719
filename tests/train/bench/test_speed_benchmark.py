"""The benchmark: alternating rounds, ratios, accuracy, and the whole command at tiny size."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer

from tiny import command
from train.bench import defaults, parts, timing
from train.bench.baselines import (
    BERT,
    DEFAULT,
    MODERN,
    OUR_BERT,
    OURS,
    OURS_WITHOUT_POSITIONS,
    SPARSE,
    STOCK,
    BenchBatch,
    Workload,
    make_training_step,
)
from train.bench.processes import time_steps
from train.bench.speed import main
from train.bench.timing import Benchmark, BenchSettings, speedup
from train.bench.trainer_steps import make_classification_step, make_pretraining_step
from train.settings import InputError


def tiny(tmp_path, **changes):
    return BenchSettings(scale="tiny", rounds=2, output=str(tmp_path / "speed.json"), **changes)


def test_models_alternate_and_the_first_turn_is_dropped():
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    seconds = time_steps(steps, 2, torch.device("cpu"))
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert [len(values) for values in seconds.values()] == [2, 2]


def test_ratios_are_taken_within_a_round():
    assert speedup([4.0, 9.0, 1.0], [2.0, 3.0, 1.0]) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize("padded", [False, True])
def test_every_model_computes_the_same_loss_on_the_same_tokens(padded, monkeypatch):
    """With all weights 0 every loss is ln V, whatever the model: tokens are counted alike."""
    workload = Workload("tiny", 3, 40, dropout=0.0, padded=padded)
    torch.manual_seed(0)
    batch = BenchBatch.random(workload)
    assert int(batch.attention_mask.sum()) == workload.tokens == batch.packed["input_ids"].numel()
    assert int((batch.labels >= 0).sum()) == len(batch.packed["labels"])
    monkeypatch.setattr(
        "train.bench.baselines.adamw", lambda model, *rest: torch.optim.SGD(zero(model))
    )
    losses = []
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: losses.append(loss.item()))
    names = (OURS, OURS_WITHOUT_POSITIONS, OUR_BERT, STOCK, BERT, MODERN, DEFAULT, SPARSE)
    for name in names:
        make_training_step(name, workload, batch)()
    assert losses == pytest.approx([torch.tensor(30522.0).log().item()] * len(names), rel=1e-5)


def zero(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model.parameters()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"device": "tpu"}, "device"),
        ({"parts": ["training", "speed"]}, "parts .* got speed"),
        ({"rounds": 1}, "rounds .* got 1"),
        ({"scale": "huge"}, "scale .* got huge"),
        ({"output": "speed.md"}, "output .* got speed.md"),
        ({"output": "/dev/null/speed.json"}, "output .* got /dev/null"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, changes, match):
    with pytest.raises(InputError, match=match):
        main(BenchSettings(**{"output": str(tmp_path / "x.json"), **changes}))


@pytest.mark.slow
def test_all_tables_are_written(tmp_path):
    names = list(parts.PARTS["cpu"])
    main(tiny(tmp_path))
    written = json.loads((tmp_path / "speed.json").read_text())
    assert list(dict.fromkeys(row["part"] for row in written["rows"])) == names
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_a_part_measured_alone_replaces_its_rows_and_keeps_the_others(tmp_path, capsys):
    for part, rounds in (("peak", 2), ("data", 2), ("peak", 3)):
        main(replace(tiny(tmp_path), parts=[part], rounds=rounds))
    written = json.loads((tmp_path / "speed.json").read_text())
    assert [row["part"] for row in written["rows"]] == ["peak"] * 2 + ["data"] * 2
    assert all(row["reached"] is None for row in written["rows"])  # as the models are tiny
    assert {"machine", "torch", "transformers", "threads"} <= set(written)
    assert "commit" in written["parts"]["data"]
    page = (tmp_path / "speed.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("## ")] == ["## peak", "## data"]
    assert "0 of 0 targets reached" in capsys.readouterr().out


def test_every_cell_of_default_options_is_measured_and_has_a_target(tmp_path, monkeypatch):
    """With invented times: a half of transformers' by default, a fifth with sparse_prediction."""
    cells = []

    def measure(self, models, make_step):
        cells.append((make_step.__name__, str(models[DEFAULT])))
        return {STOCK: [1.0, 1.0], DEFAULT: [0.5, 0.5], SPARSE: [0.2, 0.2]}

    monkeypatch.setattr(Benchmark, "measure", measure)
    monkeypatch.setattr(Benchmark, "workload", lambda self, **fields: Workload(**fields))
    benchmark = Benchmark(replace(tiny(tmp_path), scale="full"))
    defaults.compare_defaults(benchmark, "defaults")
    shapes = ("32 x 128", "8 x 512", "2 x 2048")
    for step, dropout in (("forward", "0"), ("logits", "0"), ("training", "0.1")):
        assert sorted(cell for name, cell in cells if name == f"make_{step}_step") == sorted(
            f"small, {shape}, {precision}, dropout {dropout}{padding}"
            for shape in shapes
            for precision in ("fp32", "bf16")
            for padding in ("", ", 40% padding")
        )
    single = [row for row in benchmark.rows if "mean" not in row.case]
    assert len(single) == 48
    assert {(row.value, row.asked, row.reached) for row in single} == {
        (2.0, ">= 1 x", True),
        (5.0, ">= 1 x", True),
    }
    means = {
        (row.case, row.peer): (row.value, row.asked) for row in benchmark.rows if row not in single
    }
    assert means == {
        ("inference, geometric mean", DEFAULT): (pytest.approx(2), ">= 1.9 x"),
        ("inference with logits, geometric mean", DEFAULT): (pytest.approx(2), ""),
        ("training, geometric mean", DEFAULT): (pytest.approx(2), ">= 1.4 x"),
        ("training, geometric mean", SPARSE): (pytest.approx(5), ">= 3.7 x"),
    }


@pytest.mark.parametrize("make_step", [make_pretraining_step, make_classification_step])
def test_trainer_gets_the_same_rows_for_both_models_and_no_option(make_step, monkeypatch):
    trainers = []
    monkeypatch.setattr(Trainer, "train", lambda self: trainers.append(self))
    workload = Workload("tiny", 2, 32)
    batch = BenchBatch.random(workload)
    for name in (STOCK, DEFAULT, SPARSE):
        make_step(name, workload, batch)()
    assert [type(x.model).__module__.split(".")[0] for x in trainers] == [
        "transformers", "roformer", "roformer",
    ]  # fmt: skip
    assert len({json.dumps(x.train_dataset) for x in trainers}) == 1
    assert {x.args.max_steps * x.args.train_batch_size for x in trainers} == {6}
    sparse = [getattr(x.model.config, "sparse_prediction", False) for x in trainers]
    assert sparse == [False, False, True]


def test_transformers_is_left_out_of_long_texts_where_memory_is_short(monkeypatch):
    workload = Workload("small", 1, 8192)
    for available, inference, training in (
        (4e9, False, False),
        (6e9, True, False),
        (9e10, True, True),
    ):
        memory = SimpleNamespace(available=available)
        monkeypatch.setattr(defaults.psutil, "virtual_memory", lambda memory=memory: memory)
        found = [defaults.stock_fits(workload, is_training) for is_training in (False, True)]
        assert found == [inference, training]


def test_datasets_evaluate_and_matplotlib_are_not_needed(tmp_path):
    """A machine with a GPU may have what torch needs, and little more."""
    without = "sys.modules |= dict.fromkeys(('datasets', 'evaluate', 'matplotlib'))"
    start = "runpy.run_module('train.bench', run_name='__main__')"
    code = f"import runpy, sys; {without}; {start}"
    flags = ("--scale=tiny", "--rounds=2", "--parts=[peak, data]")
    done = command("-c", code, *flags, f"--output={tmp_path / 'speed.json'}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "speed.md").exists()


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path, monkeypatch):
    """Traced as compilation does, without machine code: faults show before a GPU is used."""
    compiled = []

    def trace(module, **options):
        compiled.append(options)
        return original(module, backend="aot_eager", **options)

    original = torch.compile
    monkeypatch.setattr(torch, "compile", trace)
    monkeypatch.setattr(timing, "in_new_process", lambda function, *x: function(*x))
    benchmark = Benchmark(tiny(tmp_path))
    for part in ("training", "rope"):
        parts.PARTS["cuda"][part](benchmark)
    assert {row.part for row in benchmark.rows} == {"training", "rope"}
    assert len(compiled) == 7  # five shapes and two more models; rope is compiled on a GPU only
    workload = Workload("tiny", 2, 32, compiled=True)
    for name in (OURS, OURS_WITHOUT_POSITIONS):
        make_training_step(name, workload, BenchBatch.random(workload))()


def test_freed_memory_is_kept():
    code = """
import psutil, torch
from train.bench.baselines import keep_freed_memory
for prepare in (lambda: None, keep_freed_memory):
    prepare()
    x = [torch.ones(2**24) for _ in range(4)]
    del x
    print(psutil.Process().memory_info().rss)
"""
    returned, kept = map(int, command("-c", code).stdout.split())
    assert kept - returned > 200_000_000
