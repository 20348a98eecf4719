"""Two models compared seed by seed: how large the difference is, and how sure one can be of it.

The seeds are those of fine-tuning (head, order of examples, dropout) of two fixed checkpoints, or
those of pretraining, with a mean over fine-tuning each. The validation examples are fixed: what
another sample of them would change is not covered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Key = TypeVar("Key")
Interval = tuple[float, float]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Comparison:
    """First minus second over the seeds that both have a score for.

    Attributes:
        differences: Seed -> difference.
        tried: Seeds that either side was run with; some may lack a score, or a partner.
        mean: Mean difference.
        median: Median difference.
        std: Sample standard deviation; None for a single seed, as all that follow.
        t_interval: 95 % interval of the mean by Student's t.
        p: Two-sided p-value of the paired t-test.
        p_holm: The same after Holm's correction over the tasks of one comparison.
        cohen_dz: Mean over standard deviation of the differences.
        hedges_gz: The same without its bias at few seeds; None for fewer than three.
        why: Why there is no interval and no test; empty when there are.
    """

    differences: dict[int, float]
    tried: int
    mean: float
    median: float
    std: float | None = None
    t_interval: Interval | None = None
    p: float | None = None
    p_holm: float | None = None
    cohen_dz: float | None = None
    hedges_gz: float | None = None
    why: str = ""


def compare(first: Mapping[int, float], second: Mapping[int, float], tried: int) -> Comparison:
    """First minus second, seed by seed.

    Args:
        first: Seed -> score.
        second: The same of the other model; at least one seed is in both.
        tried: Seeds that either side was run with.

    Returns:
        The comparison; without a test where one pair, or equal differences, leave nothing to test.
    """
    seeds = sorted(first.keys() & second.keys())
    a, b = (np.array([side[seed] for seed in seeds]) for side in (first, second))
    values = a - b
    whole = Comparison(
        dict(zip(seeds, values.tolist())), tried, float(values.mean()), float(np.median(values))
    )
    if len(values) < 2:
        return replace(whole, why="there is one pair")
    if np.allclose(values, values[0], rtol=0, atol=1e-9):
        return replace(whole, std=0.0, why="all pairs differ by the same")
    test = stats.ttest_rel(a, b)
    std, freedom = float(values.std(ddof=1)), len(values) - 1
    effect = whole.mean / std
    return replace(
        whole,
        std=std,
        t_interval=t_interval(values),
        p=float(test.pvalue),
        cohen_dz=effect,
        hedges_gz=effect * (1 - 3 / (4 * freedom - 1)) if freedom > 1 else None,
    )


def t_interval(values: ArrayLike) -> Interval:
    """95 % interval of the mean of values [n] by Student's t, n of at least 2."""
    sample: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(sample) - 1) * stats.sem(sample)
    return float(sample.mean() - reach), float(sample.mean() + reach)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the p-values of a family, for its chance of any false alarm."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    steps = np.maximum.accumulate(factors * np.asarray(p_values)[order])
    corrected[order] = np.minimum(1.0, steps)
    return corrected.tolist()


def corrected(family: Mapping[Key, Comparison]) -> dict[Key, Comparison]:
    """The comparisons of a family with `p_holm` filled in where there is a p-value."""
    tested = {key: c.p for key, c in family.items() if c.p is not None}
    values = dict(zip(tested, holm(list(tested.values()))))
    return {key: replace(c, p_holm=values.get(key)) for key, c in family.items()}
