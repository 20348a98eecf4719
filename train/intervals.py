"""Intervals and tests over seeds: Student's t, the paired t-test, Holm's correction.

The seeds are those of fine-tuning (classification head, order of examples, dropout) of fixed
checkpoints, or those of pretraining, each represented by its mean over fine-tuning. The validation
examples are fixed: the variance from sampling other examples is not covered.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

Interval = tuple[float, float]

MIN_RUNS = 4
"""Fewer values have neither an interval nor a test: they are shown one by one."""


def t_interval(values: ArrayLike) -> Interval:
    """95 % interval of the mean of values [n] by Student's t, n of at least 2."""
    sample = np.asarray(values, dtype=np.float64)
    # scipy's own `t.interval` is NaN for equal values
    half = stats.t.ppf(0.975, len(sample) - 1) * stats.sem(sample)
    return float(sample.mean() - half), float(sample.mean() + half)


@dataclass(frozen=True)
class Comparison:
    """First minus second over the seeds for which both have a score.

    Attributes:
        differences: Seed -> difference.
        tried: Number of seeds either side was run with, scored or not.
        mean: Mean difference.
        t_interval: 95 % interval of the mean by Student's t; like all that follow None for fewer
            than `MIN_RUNS` seeds and where all differ by the same.
        p: Two-sided p-value of the paired t-test.
        p_holm: The same after Holm's correction over the tasks of one comparison.
    """

    differences: dict[int, float]
    tried: int
    mean: float
    t_interval: Interval | None = None
    p: float | None = None
    p_holm: float | None = None


def compare(first: Mapping[int, float], second: Mapping[int, float], tried: int) -> Comparison:
    """Compare scores by seed, at least one of which both sides have: first minus second."""
    seeds = sorted(first.keys() & second.keys())
    values = np.array([first[seed] - second[seed] for seed in seeds])
    differences = dict(zip(seeds, values.tolist()))
    t, p = None, None
    if len(values) >= MIN_RUNS and np.ptp(values) > 1e-9:  # beyond rounding of equal differences
        t, p = t_interval(values), float(stats.ttest_1samp(values, 0.0).pvalue)
    return Comparison(differences, tried, float(values.mean()), t, p)


def holm_corrected(family: Mapping[str, Comparison]) -> dict[str, Comparison]:
    """Fill in `p_holm` of the comparisons of a family that have a p-value.

    Holm's step-down correction (1979) bounds the family-wise error rate.
    """
    tested = {key: c.p for key, c in family.items() if c.p is not None}
    corrected, largest = dict[str, float](), 0.0
    for rank, key in enumerate(sorted(tested, key=tested.__getitem__)):
        largest = max(largest, (len(tested) - rank) * tested[key])
        corrected[key] = min(1.0, largest)
    return {key: replace(c, p_holm=corrected.get(key)) for key, c in family.items()}
