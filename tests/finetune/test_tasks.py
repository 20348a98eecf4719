import pytest

from finetune.settings import GlueSettings
from finetune.tasks import TASKS
from tiny import refused
from train.command_line import parse_settings

NLI = ("premise", "hypothesis"), ("entailment", "neutral", "contradiction")
TWO = ("sentence1", "sentence2")
# as nyu-mll/glue has them, written down a second time: columns, names of the ids, headline
GLUE = {
    "cola": (("sentence",), ("unacceptable", "acceptable"), "matthews"),
    "sst2": (("sentence",), ("negative", "positive"), "accuracy"),
    "mrpc": (TWO, ("not_equivalent", "equivalent"), "f1"),
    "stsb": (TWO, None, "spearman"),
    "qqp": (("question1", "question2"), ("not_duplicate", "duplicate"), "f1"),
    "mnli": (*NLI, "accuracy"),
    "qnli": (("question", "sentence"), ("entailment", "not_entailment"), "accuracy"),
    "rte": (TWO, ("entailment", "not_entailment"), "accuracy"),
    "wnli": (TWO, ("not_entailment", "entailment"), "accuracy"),
    "ax": (*NLI, "matthews"),
}


def test_glue_has_nine_tasks_and_ax_with_the_headline_metrics_of_the_paper():
    found = {x.name: (x.columns, x.labels, x.headline) for x in TASKS.values() if x.is_glue}
    assert found == GLUE
    assert TASKS["stsb"].value_range == (0, 5)


@pytest.mark.parametrize(
    ("task", "rows", "dataset", "official"),
    [
        ("mnli", {"train": 392702}, "mnli", True),
        ("mnli", {"train": 8999}, "mnli (9k)", False),
        ("rte", {"train": 100}, "rte (100)", False),
        ("rte", {"train": 2490, "validation": 276}, "rte (2k)", False),
        ("demo-order", {"train": 8999}, "demo-order", False),
    ],
)
def test_only_the_official_row_counts_make_an_official_result(task, rows, dataset, official):
    assert TASKS[task].dataset_name(rows) == dataset
    assert TASKS[task].is_official(rows) is official


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--task", "colla"], ["task", "must be one of cola", "'colla'"]),
        (["--task", "ax"], ["'ax'", "fine-tune mnli"]),
        (["--task", "rte", "--epochs", "0"], ["epochs", "positive", "got 0"]),
        (["--task", "rte", "--schedule", "sometimes"], ["schedule", "linear", "got sometimes"]),
        (["--task", "rte", "--warmup_share", "1"], ["warmup_share", "below 1"]),
        (["--task", "rte", "--output", "."], ["output", "must name a file"]),
        (["--task", "rte", "--pooling", "max"], ["pooling must", "got max"]),
        (["--task", "rte", "--pair_encoding", "both"], ["pair_encoding must", "got both"]),
        (["--task", "rte", "--pair_encoding", "separate"], ["pair_encoding must be joint"]),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(flags, words):
    refused(lambda: parse_settings(GlueSettings, ["--model", "m", *flags]), *words)
