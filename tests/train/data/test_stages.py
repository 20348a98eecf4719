"""Stages of a run: one after the other, each with a length, batch and text of its own."""

import json
import shutil

import pytest

from tiny import log_rows
from train.command_line import parse_settings
from train.data.batching import StagedDataset, stage_seed
from train.pretrain import main
from train.settings import InputError, PretrainSettings, split_stages

STAGES = [
    {"steps": 2},
    {"steps": 4, "length": 48, "batch_size": 8, "micro_batch": 8},
    {"steps": 2, "length": 16},
]


def run(flags: list[str], *more: str, stages: list[dict] | None = None) -> PretrainSettings:
    value = f"--stages={json.dumps(STAGES if stages is None else stages)}"
    settings = parse_settings(PretrainSettings, [*flags, "--optim.steps=null", value, *more])
    main(settings)
    return settings


def test_stages_replace_what_they_name_and_keep_the_rest(pretrain_flags):
    value = f"--stages={json.dumps(STAGES)}"
    settings = parse_settings(PretrainSettings, [*pretrain_flags, "--optim.steps=null", value])
    stages = split_stages(settings)
    assert [s.corpus.length for s in stages] == [32, 48, 16]
    assert [s.optim.batch_size for s in stages] == [16, 8, 16]
    assert [s.optim.steps for s in stages] == [2, 4, 2]
    assert all(s.optim.learning_rate == settings.optim.learning_rate for s in stages)
    assert len({stage_seed(0, number) for number in range(3)}) == 3
    assert stage_seed(7, 0) == 7


def test_a_run_goes_through_its_stages_and_over_their_borders_after_a_break(
    pretrain_flags, tmp_path
):
    whole = run(pretrain_flags, "--run.name=whole")
    assert set(log_rows(tmp_path / "runs" / "whole")) == set(range(1, 9))
    tokens = log_rows(tmp_path / "runs" / "whole", "tokens")
    assert tokens[2] - tokens[1] > tokens[3] - tokens[2] > 0  # half the batch, a bit longer
    for step in range(1, 4):  # one step per launch, into the second stage
        run(pretrain_flags, "--run.name=broken", "--run.max_hours=1e-9")
        assert max(log_rows(tmp_path / "runs" / "broken")) == step
    run(pretrain_flags, "--run.name=broken")
    for key in ("loss", "tokens", "learning_rate", "gradient_norm"):
        a, b = (log_rows(tmp_path / "runs" / name, key) for name in ("whole", "broken"))
        assert a == b
    weights = [tmp_path / "runs" / n / "model" / "model.safetensors" for n in ("whole", "broken")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert whole.optim.steps is None


def test_a_stage_goes_on_in_other_micro_batches_and_not_in_other_batches(pretrain_flags, tmp_path):
    run(pretrain_flags, "--run.max_hours=1e-9")
    smaller = [STAGES[0], STAGES[1] | {"micro_batch": 4}, STAGES[2]]
    run(pretrain_flags, stages=smaller)
    with pytest.raises(InputError, match="stages must stay"):
        run(pretrain_flags, stages=[STAGES[0], STAGES[1] | {"batch_size": 16}, STAGES[2]])


def test_held_out_text_has_the_length_of_the_corpus_whatever_the_stages(pretrain_flags, tmp_path):
    run(pretrain_flags, "--run.name=short", stages=[{"steps": 4, "length": 16}])
    run(pretrain_flags, "--run.name=whole", stages=[{"steps": 4}])
    counts = [log_rows(tmp_path / "runs" / x, "validation_tokens") for x in ("short", "whole")]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"steps": 4, "length": 4}], r"stages\[0\]: corpus.length must be at least 8, got 4"),
        (
            [{"steps": 4}, {"steps": 0}],
            r"stages\[1\]: optim.steps must be positive and finite, got 0",
        ),
        ([{"length": 64}], "steps"),
        ([{"steps": 4, "micro_batch": 5}], "optim.batch_size must be a multiple"),
        ([{"steps": 4, "train": "/nowhere"}], "corpus.train must exist, got '/nowhere'"),
        ([], "optim needs one of optim.steps, .*, stages, got none"),
    ],
)
def test_impossible_stages_are_refused_by_name(stages, message, pretrain_flags, tmp_path):
    with pytest.raises(InputError, match=message):
        run(pretrain_flags, stages=stages)
    assert not (tmp_path / "runs").exists()


def test_a_text_changed_in_one_stage_is_noticed(pretrain_flags, other_text, tmp_path):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        shutil.copy(other_text, tmp_path / place / "other.jsonl")
    here, there = (
        [{"steps": 4}, {"steps": 4, "train": str(tmp_path / x)}] for x in ("here", "there")
    )
    run(pretrain_flags, stages=here)
    run(pretrain_flags, stages=there)  # the same text in another place
    with pytest.raises(InputError, match="must give the tokens .* the run began with"):
        run(pretrain_flags, stages=[{"steps": 4}, {"steps": 4}])


def test_a_stage_begins_at_once_where_the_one_before_it_ends():
    class Named(str):
        def __getitem__(self, step):
            return str(self), step

    stages = StagedDataset([(4, Named("first")), (None, Named("second"))])
    assert [stages[step] for step in (3, 4, 5)] == [("first", 3), ("second", 0), ("second", 1)]
