"""The benchmark: turns, ratios, the check that comes first, and the whole command at tiny sizes."""

import json

import pytest
import torch

from roformer.kernels import attention
from tiny import command
from train.bench import speed
from train.bench.baselines import (
    BERT,
    MODERN,
    OUR_BERT,
    OURS,
    STOCK,
    Batch,
    Work,
    training_step,
    without_positions,
)
from train.bench.speed import Bench, BenchSettings, check, main, spread
from train.loop import objective
from train.settings import InputError


def tiny(tmp_path, **changes):
    return BenchSettings(scale="tiny", rounds=2, output=str(tmp_path / "speed.json"), **changes)


def test_peers_take_turns_and_the_first_round_is_dropped(tmp_path):
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    seconds = Bench(tiny(tmp_path)).turns(steps)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert [len(values) for values in seconds.values()] == [2, 2]


def test_a_ratio_is_that_of_neighbours():
    assert spread([4.0, 9.0, 1.0], [2.0, 3.0, 1.0]) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize("padded", [False, True])
def test_every_peer_computes_the_same_loss_on_the_same_tokens(padded, monkeypatch):
    """With all weights 0 every loss is ln V, whatever the model: tokens are counted alike."""
    work = Work("tiny", 3, 40, dropout=0.0, padded=padded)
    torch.manual_seed(0)
    batch = Batch.of(work)
    assert int(batch.mask.sum()) == work.tokens == batch.packed["input_ids"].numel()
    assert int((batch.labels >= 0).sum()) == len(batch.packed["labels"])
    monkeypatch.setattr(
        "train.bench.baselines.adamw", lambda model, *rest: torch.optim.SGD(zero(model))
    )
    losses = []
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: losses.append(loss.item()))
    for name in (OURS, OUR_BERT, STOCK, BERT, MODERN):
        training_step(name, work, batch)()
    assert losses == pytest.approx([torch.tensor(30522.0).log().item()] * 5, rel=1e-5)


def zero(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model.parameters()


WRONG = {
    "unpadded in fp32": (attention, "_attend", lambda m, q, k, v, *rest: v.transpose(1, 2)),
    "unpadded in bf16": (
        attention,
        "eager_attention",
        lambda m, q, k, v, *rest: (v.transpose(1, 2), None),
    ),
    "loss in fp32": (
        objective._CrossEntropy,
        "backward",
        lambda ctx, *rest: (0 * ctx.saved_tensors[0], None),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_not_measured(tmp_path, monkeypatch, name):
    holder, function, wrong = WRONG[name]
    static = staticmethod(wrong) if holder is objective._CrossEntropy else wrong
    monkeypatch.setattr(holder, function, static)
    with pytest.raises(InputError, match=f"{name} must agree with float64"):
        check(Bench(tiny(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"device": "tpu"}, "device must be cpu"),
        ({"parts": ["training", "speed"]}, "parts must be of check, training.*got speed"),
        ({"rounds": 1}, "rounds must be at least 2, got 1"),
        ({"output": "speed.md"}, r"output must end in .json, got speed.md"),
        ({"output": "/proc/speed.json"}, "output must be a file that can be written"),
    ],
)
def test_bad_settings_are_refused(tmp_path, changes, line):
    settings = BenchSettings(**{"output": str(tmp_path / "x.json"), **changes})
    with pytest.raises(InputError, match=line):
        main(settings)


def test_an_unknown_scale_is_refused():
    with pytest.raises(InputError, match="scale must be one of full, tiny, got huge"):
        main(BenchSettings(scale="huge"))


def test_all_tables_are_written_and_nothing_is_asked_of_a_trial(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "keep_freed_memory", lambda: None)  # for good in this process
    parts = [part for part in speed.PARTS["cpu"] if part != "start"]
    main(tiny(tmp_path, parts=parts))
    written = json.loads((tmp_path / "speed.json").read_text())
    assert {row["part"] for row in written["rows"]} == set(parts)
    assert all(row["reached"] is None for row in written["rows"])
    assert {"machine", "torch", "transformers", "commit", "threads"} <= set(written)
    table = (tmp_path / "speed.md").read_text()
    assert [line for line in table.splitlines() if line.startswith("## ")] == [
        f"## {part}" for part in parts
    ]
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    assert "0 of 0 targets reached" in capsys.readouterr().out


def test_datasets_evaluate_and_matplotlib_are_not_needed(tmp_path):
    """A machine with a GPU may have what torch needs, and little more."""
    without = "sys.modules |= dict.fromkeys(('datasets', 'evaluate', 'matplotlib'))"
    start = "runpy.run_module('train.bench', run_name='__main__')"
    code = f"import runpy, sys; {without}; {start}"
    flags = ("--scale=tiny", "--rounds=2", "--parts=[check, training, data]")
    done = command("-c", code, *flags, f"--output={tmp_path / 'speed.json'}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "speed.md").exists()


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_runs_on_a_cpu(tmp_path, monkeypatch):
    """Traced as compilation does, without machine code: faults show before a GPU is used."""
    compiled = []

    def traced(module, **options):
        compiled.append(options)
        return real(module, backend="aot_eager", **options)

    real = torch.compile
    monkeypatch.setattr(torch, "compile", traced)
    trial = Bench(tiny(tmp_path))
    for part in ("check", "training", "rope", "length"):
        speed.PARTS["cuda"][part](trial)
    assert {row.part for row in trial.rows} == {"check", "training", "rope", "length"}
    assert len(compiled) == 7  # five shapes, two peers
    work = Work("tiny", 2, 32, compiled=True)  # the rotation, which only a GPU compiles
    step = training_step(OURS, work, Batch.of(work))
    step()
    without_positions(step)()


def test_the_memory_of_freed_tensors_is_kept():
    code = """
import psutil, torch
from train.bench.baselines import keep_freed_memory
for prepare in (lambda: None, keep_freed_memory):
    prepare()
    x = [torch.ones(2**24) for _ in range(4)]
    del x
    print(psutil.Process().memory_info().rss)
"""
    given_back, kept = map(int, command("-c", code).stdout.split())
    assert kept - given_back > 200_000_000
