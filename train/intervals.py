"""Confidence intervals over seeds, of pretraining or of fine-tuning."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


def t_interval(values: ArrayLike) -> tuple[float, float]:
    """95 % interval of the mean of values [n] by Student's t, n of at least 2."""
    sample = np.asarray(values, dtype=np.float64)
    # scipy's own `t.interval` is NaN for equal values
    half = stats.t.ppf(0.975, len(sample) - 1) * stats.sem(sample)
    return float(sample.mean() - half), float(sample.mean() + half)
