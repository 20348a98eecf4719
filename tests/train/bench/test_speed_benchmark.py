"""The benchmark: alternating rounds, ratios, accuracy, and the whole command at tiny size."""

import json

import pytest
import torch

from roformer.kernels import attention
from tiny import command
from train.bench import parts
from train.bench.baselines import (
    BERT,
    MODERN,
    OUR_BERT,
    OURS,
    OURS_WITHOUT_POSITIONS,
    STOCK,
    BenchBatch,
    Workload,
    make_training_step,
)
from train.bench.speed import main
from train.bench.timing import Benchmark, BenchSettings, speedup
from train.settings import InputError


def tiny(tmp_path, **changes):
    return BenchSettings(scale="tiny", rounds=2, output=str(tmp_path / "speed.json"), **changes)


def test_models_alternate_and_the_first_round_is_dropped(tmp_path):
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    seconds = Benchmark(tiny(tmp_path)).time_steps(steps)
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
    names = (OURS, OURS_WITHOUT_POSITIONS, OUR_BERT, STOCK, BERT, MODERN)
    for name in names:
        make_training_step(name, workload, batch)()
    assert losses == pytest.approx([torch.tensor(30522.0).log().item()] * len(names), rel=1e-5)


def zero(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model.parameters()


@pytest.mark.parametrize(
    ("function", "wrong", "name"),
    [
        ("_batched_attention", lambda q, k, v, *rest: v.transpose(1, 2), "unpadded in fp32"),
        (
            "_full_attention",
            lambda q, k, v, *rest: v.transpose(1, 2),
            "unpadded in bf16",
        ),
    ],
)
def test_a_wrong_kernel_is_not_measured(tmp_path, monkeypatch, function, wrong, name):
    monkeypatch.setattr(attention, function, wrong)
    with pytest.raises(InputError, match=f"{name} must agree with float64"):
        parts.check(Benchmark(tiny(tmp_path)))


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


def test_all_tables_are_written_and_tiny_measurements_have_no_target(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parts, "keep_freed_memory", lambda: None)  # it would last for all tests
    names = list(parts.PARTS["cpu"])
    main(tiny(tmp_path))
    written = json.loads((tmp_path / "speed.json").read_text())
    assert {row["part"] for row in written["rows"]} == set(names)
    assert all(row["reached"] is None for row in written["rows"])
    assert {"machine", "torch", "transformers", "commit", "threads"} <= set(written)
    page = (tmp_path / "speed.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        f"## {name}" for name in names
    ]
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    assert "0 of 0 targets reached" in capsys.readouterr().out


def test_datasets_evaluate_and_matplotlib_are_not_needed(tmp_path):
    """A machine with a GPU may have what torch needs, and little more."""
    without = "sys.modules |= dict.fromkeys(('datasets', 'evaluate', 'matplotlib'))"
    start = "runpy.run_module('train.bench', run_name='__main__')"
    code = f"import runpy, sys; {without}; {start}"
    flags = ("--scale=tiny", "--rounds=2", "--parts=[training, data]")
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
    benchmark = Benchmark(tiny(tmp_path))
    for part in ("check", "training", "rope"):
        parts.PARTS["cuda"][part](benchmark)
    assert {row.part for row in benchmark.rows} == {"check", "training", "rope"}
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
