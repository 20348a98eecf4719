"""The metrics of tasks: functions of scikit-learn and scipy behind the interface of `evaluate`.

A correlation with a constant is undefined. Here it is 0.0 without a warning, like scikit-learn's
Matthews correlation: a model that predicts one class scores 0.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import datasets
import evaluate
import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from finetune.tasks import Task


def correlation(function: Callable[..., Any], labels: NDArray, predictions: NDArray) -> float:
    """A correlation by `function`, 0.0 if labels or predictions are constant."""
    for values in (labels, predictions):
        # nearly equal values count as equal: their correlation is rounding noise
        if np.allclose(values, values.flat[0], rtol=1e-9, atol=0.0):
            return 0.0
    result = function(labels, predictions)
    return getattr(result, "statistic", result)


METRICS: dict[str, Callable[[NDArray, NDArray], float]] = {
    "matthews": partial(correlation, matthews_corrcoef),
    "accuracy": accuracy_score,
    "f1": partial(f1_score, zero_division=0.0),
    "macro_f1": partial(f1_score, average="macro", zero_division=0.0),
    "pearson": partial(correlation, stats.pearsonr),
    "spearman": partial(correlation, stats.spearmanr),
}
"""Functions of labels and predictions, [N] each; f1 is that of class 1."""


class GlueMetric(evaluate.Metric):
    """The metrics of a task, which is an argument of `compute`, by name.

    A subclass of `evaluate.Metric`, because `evaluate.load` fetches the code of its metrics from
    the hub. `compute` checks that there is one number for each label, then calls `_compute`.
    """

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("float64")  # a class id or a value
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo("GLUE's metrics", "Wang et al. 2019, arXiv:1804.07461", features)

    def _compute(self, predictions: Any, references: Any, task: Task) -> dict[str, float]:
        values = np.asarray(references), np.asarray(predictions)
        return {name: float(METRICS[name](*values)) for name in task.metrics}


def compute_metrics(task: Task, predictions: NDArray, labels: NDArray) -> dict[str, float]:
    """Compute the task's metrics; predictions and labels are class ids or values, [N]."""
    # in memory: leaves no file, and concurrent runs do not wait for a lock
    metric = GlueMetric(keep_in_memory=True)
    return metric.compute(predictions=predictions, references=labels, task=task)


def score_fields(
    task: Task, logits: Mapping[str, NDArray], labels: Mapping[str, NDArray]
) -> dict[str, Any]:
    """Score the validation splits, and a test split of your own whose rows all have labels.

    Logits are [N, num_labels] and labels [N] of each split.

    Returns:
        The fields `collapsed`, `metrics`, `headline` and perhaps `test_metrics` of a line of the
        results.
    """
    scores, splits = {}, task.validation_splits
    is_scored = task.is_own and "test" in logits and not task.is_missing(labels["test"]).any()
    for split in (*splits, "test") if is_scored else splits:
        values = logits[split]
        predictions = values[:, 0] if task.is_regression else values.argmax(axis=1)
        scores[split] = compute_metrics(task, predictions, labels[split])
    test = {"test_metrics": scores.pop("test")} if is_scored else {}
    return {
        "collapsed": all(is_collapsed(task, logits[x], labels[x]) for x in splits),
        "metrics": scores,
        "headline": headline_score(task, scores),
    } | test


def score_majority(
    task: Task, train_labels: NDArray, labels: Mapping[str, NDArray]
) -> dict[str, dict[str, float]]:
    """Score the constant prediction: the most frequent training class, or the mean value."""
    constant = train_labels.mean() if task.is_regression else np.bincount(train_labels).argmax()
    return {
        split: compute_metrics(task, np.full(len(x), constant), x) for split, x in labels.items()
    }


def headline_score(task: Task, scores: Mapping[str, dict[str, float]]) -> float:
    """Average the headline metric over the validation splits, of which MNLI has two."""
    return float(np.mean([metrics[task.headline] for metrics in scores.values()]))


def is_collapsed(task: Task, logits: NDArray, labels: NDArray) -> bool:
    """Whether rows of several labels get one class, or values within 0.2 % of the labels' range."""
    if task.is_regression:
        return float(np.ptp(logits)) < 2e-3 * float(np.ptp(task.value_range or labels))
    return len(np.unique(labels)) > 1 and len(np.unique(logits.argmax(axis=1))) == 1
