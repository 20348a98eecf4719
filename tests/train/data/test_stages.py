"""Stages of a run: one after the other, each with a length, batch and text of its own."""

import json
import shutil
from functools import partial
from unittest.mock import Mock

import pytest

from launched_runs import assert_same_run
from tiny import log_rows, refused
from train.command_line import parse_settings
from train.data.batching import BatchFormat
from train.settings import PretrainSettings, split_stages

STAGES = [
    {"steps": 2},
    {"steps": 4, "length": 48, "batch_size": 8, "micro_batch": 8},
    {"steps": 2, "length": 16, "mask_rate": 0.3},
]


def stage_flags(stages: list[dict]) -> list[str]:
    return ["--optim.steps=null", f"--stages={json.dumps(stages)}"]


@pytest.fixture
def run(pretrain):
    return lambda *flags, stages=STAGES: pretrain(*stage_flags(stages), *flags)


def test_stages_replace_what_they_name_and_keep_the_rest(pretrain_flags):
    settings = parse_settings(PretrainSettings, [*pretrain_flags, *stage_flags(STAGES)])
    stages = split_stages(settings)
    assert [s.corpus.length for s in stages] == [32, 48, 16]
    assert [s.optim.batch_size for s in stages] == [16, 8, 16]
    assert [s.optim.steps for s in stages] == [2, 4, 2]
    assert all(s.optim.learning_rate == settings.optim.learning_rate for s in stages)


def test_stages_on_one_text_differ_in_order_and_masks(run, monkeypatch):
    formats = Mock(wraps=BatchFormat)
    monkeypatch.setattr("train.pretrain.BatchFormat", formats)
    run("--run.seed=7", "--run.max_hours=1e-9")
    seeds, rates = zip(*((c.kwargs["seed"], c.kwargs["mask_rate"]) for c in formats.call_args_list))
    assert (seeds[0], len({*seeds})) == (7, 3)  # the first as that of a run without stages
    assert rates == (0.15, 0.15, 0.3)


def test_a_run_goes_through_its_stages_and_over_their_borders_after_a_break(run):
    whole = run("--run.name=whole")
    assert set(log_rows(whole)) == set(range(1, 9))
    tokens = log_rows(whole, "tokens")
    assert tokens[2] - tokens[1] > tokens[3] - tokens[2] > 0  # half the batch, a bit longer
    for step in range(1, 4):  # one step per launch, into the second stage
        assert max(log_rows(run("--run.max_hours=1e-9"))) == step
    broken = run()
    assert_same_run(whole, broken)
    assert log_rows(whole, "learning_rate") == log_rows(broken, "learning_rate")


def test_a_stage_goes_on_in_other_micro_batches_and_not_in_other_batches(run):
    run("--run.max_hours=1e-9")
    run(stages=[STAGES[0], STAGES[1] | {"micro_batch": 4}, STAGES[2]])
    larger = [STAGES[0], STAGES[1] | {"batch_size": 16}, STAGES[2]]
    refused(lambda: run(stages=larger), "stages must stay")


def test_held_out_text_has_the_length_of_the_corpus_whatever_the_stages(run):
    short = run("--run.name=short", stages=[{"steps": 4, "length": 16}])
    whole = run(stages=[{"steps": 4}])
    assert log_rows(short, "validation_tokens") == log_rows(whole, "validation_tokens")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"steps": 4, "length": 4}], "stages[0]: corpus.length must be at least 8, got 4"),
        ([{"steps": 4}, {"steps": 0}], "stages[1]: optim.steps must be positive and finite, got 0"),
        ([{"steps": 4}, {"steps": 4, "train": "/no"}], "stages[1]: corpus.train must exist"),
        ([], "stages, got none"),
    ],
)
def test_impossible_stages_are_refused_by_name(stages, message, run, tmp_path):
    refused(lambda: run(stages=stages), message)
    assert not (tmp_path / "runs").exists()


def test_a_text_changed_in_one_stage_is_noticed(run, other_text, tmp_path, capsys):
    copy = shutil.copy(other_text, tmp_path / "copy.jsonl")
    for file in (other_text, copy):  # the same text in another place
        capsys.readouterr()
        run(stages=[{"steps": 2}, {"steps": 2}, {"steps": 4, "train": str(file)}])
        printed = capsys.readouterr().out
        assert printed.count("\ntrain: ") == 2  # each text once
        assert f", {file}; held out:" in printed
    changed = partial(run, stages=[{"steps": 2}, {"steps": 2}, {"steps": 4}])
    refused(changed, "corpus.train", "must give the tokens")
    shared = partial(run, "--corpus.validation=5%", stages=[{"steps": 4, "train": str(file)}])
    refused(shared, "corpus.validation must name text where stages have their own, got 5%")
