import pytest

from finetune.settings import GlueSettings, GridSettings
from finetune.tasks import TASKS
from train.command_line import parse_settings
from train.settings import InputError


def test_glue_has_nine_tasks_and_ax():
    official = [task.name for task in TASKS.values() if task.official]
    assert sorted(official) == sorted(
        ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "ax"]
    )


def test_headline_metrics_are_the_papers():
    headlines = {task.name: task.headline for task in TASKS.values() if task.official}
    rare = {"mrpc": "f1", "qqp": "f1", "stsb": "spearman", "cola": "matthews", "ax": "matthews"}
    assert headlines == {name: rare.get(name, "accuracy") for name in headlines}
    assert all(task.headline in task.metrics for task in TASKS.values())


def test_mnli_is_scored_on_both_validation_splits():
    assert TASKS["mnli"].validation_splits == ("validation_matched", "validation_mismatched")
    assert TASKS["rte"].validation_splits == ("validation",)
    assert TASKS["ax"].validation_splits == ()


@pytest.mark.parametrize(
    ("task", "train", "label", "official"),
    [
        ("mnli", 392702, "mnli", True),
        ("mnli", 8999, "mnli (9k)", False),
        ("rte", 100, "rte (100)", False),
        ("demo-order", 8999, "demo-order", False),
    ],
)
def test_only_the_official_row_counts_make_an_official_result(task, train, label, official):
    assert TASKS[task].result_label({"train": train}) == label
    assert TASKS[task].is_official({"train": train}) is official


def test_a_validation_split_with_rows_missing_is_not_official():
    rows = {"train": 2490, "validation": 276}
    assert not TASKS["rte"].is_official(rows)
    assert TASKS["rte"].result_label(rows) != "rte"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--task", "colla"], ["task", "must be one of cola", "'colla'"]),
        (["--task", "ax"], ["'ax'", "fine-tune mnli"]),
        (["--task", "demo-order"], ["glue_dir", "demo task"]),
        (["--task", "rte", "--epochs", "0"], ["epochs", "positive", "got 0"]),
        (["--task", "rte", "--schedule", "sometimes"], ["schedule", "linear", "'sometimes'"]),
        (["--task", "rte", "--warmup_share", "1"], ["warmup_share", "below 1"]),
        (["--task", "rte", "--output", "."], ["output", "must name a file"]),
        (["--task", "rte", "--lenght", "64"], ["unrecognized arguments: --lenght"]),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(flags, words):
    with pytest.raises(InputError) as caught:
        parse_settings(GlueSettings, ["--model", "m", *flags])
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_grid_flags_parse():
    flags = ["--models", "[a, b]", "--tasks", "[cola]", "--seeds", "[0, 1]"]
    rates = ["--learning_rates", "[1e-4, 2e-5]", "--random_control", "true"]
    grid = parse_settings(GridSettings, [*flags, *rates])
    assert grid.models == ["a", "b"]
    assert grid.learning_rates == [1e-4, 2e-5]
