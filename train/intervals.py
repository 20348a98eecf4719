"""Confidence intervals over seeds, of pretraining or of fine-tuning."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

CONFIDENCE = 0.95


def t_interval(values: ArrayLike) -> tuple[float, float]:
    """95 % interval of the mean of values [n] by Student's t, n of at least 2."""
    sample: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(sample) - 1) * stats.sem(sample)
    return float(sample.mean() - reach), float(sample.mean() + reach)
