"""Scores equal those of scikit-learn and scipy; constant predictions have no correlation."""

import numpy as np
import pytest

from finetune.metrics import compute_metrics, headline_score, is_collapsed
from finetune.tasks import TASKS
from tiny_glue import SCORERS

draw = np.random.default_rng(7)
VALUES = np.float32(draw.uniform(0, 5, 200)), np.float32(draw.normal(size=200))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_scores_equal_those_of_scikit_learn_and_scipy(task):
    truth, guess = VALUES
    if task.labels:
        truth, guess = (draw.integers(0, len(task.labels), 200) for _ in range(2))
    values = truth.astype(float), guess.astype(float)
    expected = {name: SCORERS[name](*values) for name in task.metrics}
    result = compute_metrics(task, guess, truth)
    assert list(result) == list(task.metrics)
    assert result == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("constant", [0, 1])
def test_a_model_that_says_one_class_has_no_correlation_and_no_warning(constant):
    truth = draw.integers(0, 2, 200)
    guess = np.full(len(truth), constant)
    assert compute_metrics(TASKS["cola"], guess, truth) == {"matthews": 0.0}
    pair = compute_metrics(TASKS["mrpc"], guess, truth)
    assert pair["accuracy"] == np.mean(truth == constant)
    assert pair["f1"] == (pytest.approx(SCORERS["f1"](truth, guess)) if constant else 0.0)


@pytest.mark.parametrize(("slope", "expected"), [(0.0, 0.0), (1e-15, 0.0), (1e-3, 1.0)])
def test_a_constant_has_no_correlation_and_values_close_together_have_one(slope, expected):
    truth = np.linspace(0, 5, 50)
    found = compute_metrics(TASKS["stsb"], 2.5 + slope * truth, truth)
    assert found == pytest.approx({"pearson": expected, "spearman": expected})


def test_the_headline_of_mnli_is_the_mean_of_both_splits():
    scores = {"validation_matched": {"accuracy": 0.8}, "validation_mismatched": {"accuracy": 0.6}}
    assert headline_score(TASKS["mnli"], scores) == pytest.approx(0.7)


@pytest.mark.parametrize(("width", "collapsed"), [(0.005, True), (0.02, False)])
def test_values_that_hardly_differ_are_one_answer(width, collapsed):
    logits = np.linspace(2.5, 2.5 + width, 9)[:, None]
    assert is_collapsed(TASKS["stsb"], logits, VALUES[0]) == collapsed


@pytest.mark.parametrize(("labels", "collapsed"), [([1, 0, 1], True), ([1, 1, 1], False)])
def test_one_answer_to_rows_of_one_class_is_no_collapse(labels, collapsed):
    logits = np.array([[0.0, 1.0]] * 3)
    assert is_collapsed(TASKS["rte"], logits, np.array(labels)) == collapsed
