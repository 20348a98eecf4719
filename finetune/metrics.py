"""GLUE's metrics as a metric of the `evaluate` library that works offline.

`evaluate` ships no metric: `evaluate.load` fetches code from the hub. This class is the same
interface over scikit-learn and scipy. A correlation with a constant is undefined; it is 0.0 here,
as scikit-learn's Matthews is: a model that predicts one class scores 0 and prints no warning.
"""

from collections.abc import Callable
from typing import Any

import datasets
import evaluate
import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics as sklearn_metrics

from finetune.tasks import TASKS

Values = NDArray[np.float64]


def matthews(references: Values, predictions: Values) -> float:
    """Matthews correlation of class ids; 0.0 when either side is constant."""
    if _is_constant(references) or _is_constant(predictions):
        return 0.0
    return float(sklearn_metrics.matthews_corrcoef(references, predictions))


def accuracy(references: Values, predictions: Values) -> float:
    """Share of equal class ids."""
    return float(np.mean(references == predictions))


def f1(references: Values, predictions: Values) -> float:
    """F1 of class 1; 0.0 when that class is neither present nor predicted."""
    return float(sklearn_metrics.f1_score(references, predictions, zero_division=0.0))


def pearson(references: Values, predictions: Values) -> float:
    """Pearson correlation; 0.0 when either side is constant."""
    if _is_constant(references) or _is_constant(predictions):
        return 0.0
    return float(stats.pearsonr(references, predictions).statistic)


def spearman(references: Values, predictions: Values) -> float:
    """Spearman's rank correlation; 0.0 when either side is constant."""
    if _is_constant(references) or _is_constant(predictions):
        return 0.0
    return float(stats.spearmanr(references, predictions).statistic)


METRICS: dict[str, Callable[[Values, Values], float]] = {
    function.__name__: function for function in (matthews, accuracy, f1, pearson, spearman)
}


class GlueMetric(evaluate.Metric):
    """The metrics of one task: `GlueMetric("mrpc").compute(predictions=..., references=...)`.

    Predictions are class ids, or values for a regression; the result maps metric names to floats.
    """

    def __init__(self, task: str) -> None:
        # in memory: nothing is left on disk and concurrent runs do not wait for each other's lock
        super().__init__(config_name=task, keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        kind = "float64" if TASKS[self.config_name].labels is None else "int64"
        return evaluate.MetricInfo(
            description="The metrics GLUE reports for one task.",
            citation="Wang et al. 2019, arXiv:1804.07461",
            features=datasets.Features(
                {"predictions": datasets.Value(kind), "references": datasets.Value(kind)}
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        truth, guess = np.asarray(references), np.asarray(predictions)
        return {name: METRICS[name](truth, guess) for name in TASKS[self.config_name].metrics}


def _is_constant(values: Values) -> bool:
    # nearly equal values count as equal: their correlation is rounding noise, and scipy warns
    return bool(np.allclose(values, values.flat[0], rtol=1e-9, atol=0.0))
