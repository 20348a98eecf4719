"""What fits and what a run would take: counted on paper, timed here, nothing written."""

import json
import re
from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.utils.flop_counter import FlopCounterMode

from launched_runs import assert_close_runs
from roformer import RoFormerConfig, RoFormerForMaskedLM
from tiny import refused, tiny_config
from tiny_tokens import VOCAB, make_token_store
from train.data.batching import BatchFormat, SequenceIndex, make_batch
from train.loop import memory
from train.loop.language_model import LanguageModel
from train.loop.memory import fit_micro_batch, largest_batch
from train.loop.optim import adamw
from train.loop.run_log import step_flops


def objective(**fields: object) -> LanguageModel:
    return LanguageModel(RoFormerForMaskedLM(tiny_config(**fields)))


def fit(model: LanguageModel, *sizes: float) -> int:
    """The micro-batch that fits: of length, micro-batch and mask rate, before the first step."""
    return fit_micro_batch(model, False, *sizes, Accelerator(cpu=True))


def test_operations_are_the_references_figures():
    base = RoFormerConfig(vocab_size=30522)
    for length, billions in ((128, 0.545), (512, 0.588), (2048, 0.758), (8192, 1.437)):
        flops = step_flops(base, length, length**2, 0.15 * length) / length
        assert flops / 1e9 == pytest.approx(billions, abs=6e-4)


@pytest.mark.parametrize("kind", ["elu", "favor"])
def test_linear_attention_is_charged_for_its_features_and_not_for_pairs(kind):
    model = objective(linear_attention=kind, random_features=64)
    batch = largest_batch(model, 2, 200, 0.15)
    with FlopCounterMode(display=False) as counter:
        model(**batch)[0].backward()
    ours = step_flops(model.model.config, 400, 2 * 200**2, len(batch["labels"]))
    assert counter.get_total_flops() == pytest.approx(ours, rel=0.1)


@pytest.fixture
def dry_run(pretrain, capsys):
    """A function that runs dry and returns what is printed: warnings, and the report."""

    def run(*flags: str) -> tuple[str, dict]:
        capsys.readouterr()
        pretrain(*flags, "--run.dry=true")
        warnings, _, report = capsys.readouterr().out.partition("{")
        return warnings, json.loads("{" + report)

    return run


def test_a_dry_run_counts_the_parameters_of_the_run(dry_run, pretrain):
    run = pretrain()
    about = json.loads((run / "environment.json").read_text())
    init = [f"--model.init={run / 'model'}", "--model.config={}", "--run.name=more"]
    assert dry_run(*init)[1]["parameters"] == about["parameters"]


def test_a_dry_run_says_what_a_run_would_take_and_writes_nothing(dry_run, tmp_path, monkeypatch):
    learn = ["--corpus.tokenizer=/nowhere", "--corpus.vocabulary_size=3000"]
    _, report = dry_run(*learn)
    model = RoFormerForMaskedLM(tiny_config(vocab_size=3000))
    assert report["parameters"] == model.num_parameters()  # with the vocabulary it would learn
    assert report["steps"] == [12]
    tokens = ["--optim.steps=null", "--optim.tokens=5000", "--optim.warmup_steps=10"]
    warnings, budget = dry_run(*learn, *tokens)
    assert budget["steps_at_least"] == [10]  # of 512 tokens, if all sequences are full
    assert "optim.warmup_steps is 10" in warnings
    assert "hidden_size" not in warnings
    unsized = '--model.config={"num_hidden_layers": 1}'  # as without a file of configs/model
    assert "no model.config.hidden_size" in dry_run(*learn, unsized)[0]
    assert report["tokens_per_step"] == [16 * 32]
    assert report["hours"] >= 0
    assert {"memory_gb", "checkpoints_gb", "processes"} <= report.keys()
    monkeypatch.setattr(memory, "peak_memory", Mock(side_effect=(1e9, 5e9, 1e9)))
    stages = "--stages=[{steps: 3}, {steps: 3}, {steps: 6}]"
    assert dry_run(*learn, "--optim.steps=null", stages)[1]["memory_gb"] >= 5
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "tokens").exists()


def test_a_dry_run_adds_up_its_stages_and_counts_moments(dry_run, monkeypatch):
    """Of micro-batches of 4 that take an hour; in units in which a tiny model has a size."""
    monkeypatch.setattr(memory, "_measure_micro_batch", lambda *rest: (4, 3600.0))
    monkeypatch.setattr(memory, "peak_memory", lambda device: 10**9)
    monkeypatch.setattr(memory, "ADAM_BYTES", 8 + 10**6)
    monkeypatch.setattr(memory, "SAVED_BYTES", 10**6)
    stages = [{"steps": 3}, {"steps": 2, "batch_size": 32, "length": 16}]
    _, report = dry_run("--optim.steps=null", f"--stages={json.dumps(stages)}")
    assert report["hours"] == 3 * 16 / 4 + 2 * 32 / 4
    assert report["tokens_at_most"] == 3 * 16 * 32 + 2 * 32 * 16
    assert report["memory_gb"] == pytest.approx(1 + report["parameters"] / 1e3, abs=0.01)
    assert report["checkpoints_gb"] == pytest.approx(4 * report["parameters"] / 1e3, abs=0.01)


@pytest.fixture
def limit_memory(monkeypatch):
    """limit_memory(name, size) makes forward run out of memory above a size of one argument."""
    forward, sizes = LanguageModel.forward, []
    no_room = torch.OutOfMemoryError("no room")

    def limit(name: str, size: int, error: Exception = no_room) -> list[int]:
        def limited(self, **batch):
            sizes.append(batch[name].numel())
            if sizes[-1] > size:
                raise error
            return forward(self, **batch)

        monkeypatch.setattr(LanguageModel, "forward", limited)
        return sizes

    return limit


@pytest.mark.parametrize(
    ("kernel", "causal", "rate", "name", "fits"),
    [
        ("sdpa", False, 0.15, "input_ids", 4),
        ("unpadded", False, 0.15, "input_ids", 4),
        # as small as its predicted tokens need
        ("sdpa", False, 0.15, "label_indices", 16),
        ("sdpa", False, 0.3, "label_indices", 8),
        ("sdpa", True, 0.15, "label_indices", 4),
    ],
)
def test_micro_batches_halve_until_they_fit(kernel, causal, rate, name, fits, limit_memory, capsys):
    model = objective(is_decoder=causal)
    model.model.set_attn_implementation(kernel)
    limit_memory(name, 5 * 24)
    assert fit(model, 24, 16, rate) == fits
    assert (f"optim.micro_batch is {fits}" in capsys.readouterr().out) == (fits < 16)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("message", "is_memory"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasCreate(handle)`", False),
        ("Expected tensor to be pre-allocated", False),
    ],
)
def test_only_errors_of_memory_are_taken_for_them(message, is_memory, limit_memory):
    model = objective()
    limit_memory("input_ids", 24, RuntimeError(message))
    with nullcontext() if is_memory else pytest.raises(RuntimeError, match=re.escape(message)):
        assert fit(model, 24, 2, 0.15) == 1


def test_moments_of_a_resumed_run_are_not_reserved_a_second_time(monkeypatch):
    model = objective()
    model.model.set_attn_implementation("eager")
    optimizer, reserved = adamw(model, 1e-3, 0.0), Mock(wraps=torch.empty_like)
    monkeypatch.setattr("train.loop.memory.torch.empty_like", reserved)
    for expected in (2 * len(list(model.parameters())), 0):
        reserved.reset_mock()
        fit_micro_batch(model, bool(optimizer.state), 24, 2, 0.15, Accelerator(cpu=True))
        made = [call.args[0] for call in reserved.call_args_list]
        assert sum(isinstance(x, torch.nn.Parameter) for x in made) == expected
        model(**largest_batch(model, 2, 24, 0.15))[0].backward()
        optimizer.step()  # as a checkpoint that is read, it gives the optimizer its moments


def test_a_sharded_process_without_memory_ends_so_that_none_waits_for_it(limit_memory, monkeypatch):
    model = objective()
    limit_memory("input_ids", 24)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    refused(lambda: fit(model, 24, 4, 0.15), "optim.micro_batch", "got 4")


def test_micro_batches_that_are_tried_divide_the_one_asked_for(limit_memory):
    """Otherwise processes would compute different numbers of micro-batches per step."""
    model, tried = objective(), limit_memory("input_ids", 0)
    refused(lambda: fit(model, 24, 28, 0.15), "corpus.length", "24")
    assert tried == [rows * 24 for rows in (28, 14, 7, 2, 1)]


def test_a_dry_run_tries_smaller_micro_batches_as_the_run_does(dry_run, limit_memory):
    limit_memory("input_ids", 3 * 32)
    warnings, report = dry_run()
    assert "out of memory; optim.micro_batch is 2" in warnings
    assert report["micro_batch"] == [2]


@pytest.mark.parametrize(("rate", "causal"), [(0.15, False), (0.9, False), (0.15, True)])
def test_no_batch_predicts_more_than_the_one_that_is_tried(rate, causal, tmp_path):
    sequences = SequenceIndex(make_token_store(np.arange(5, 300), tmp_path), 24)
    tried = largest_batch(objective(is_decoder=causal), 8, 24, rate)
    assert tried["label_indices"].max() < tried["input_ids"].numel() == 8 * 24
    for first in range(0, 160, 8):
        rows = np.arange(first, first + 8)
        batch = make_batch(sequences, rows, rows * 0, BatchFormat(VOCAB, rate, 0, causal))
        assert len(batch["labels"]) <= len(tried["labels"]) <= 8 * 24 + 8


def test_gradient_checkpointing_changes_no_loss(pretrain):
    plain = pretrain("--run.name=plain")
    saved = pretrain("--model.gradient_checkpointing=true", "--run.name=checkpointing")
    assert_close_runs(plain, saved, "loss")
