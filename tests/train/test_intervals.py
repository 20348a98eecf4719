import numpy as np
import pytest
from scipy import stats

from train.intervals import Comparison, compare, holm_corrected, t_interval


def holm(p_values):
    family = {str(n): Comparison({}, 5, 0.0, p=p) for n, p in enumerate(p_values)}
    return [comparison.p_holm for comparison in holm_corrected(family).values()]


def test_the_interval_covers_the_truth_as_often_as_it_says_even_at_two_seeds():
    draws = np.random.default_rng(0).normal(size=(1000, 2))
    intervals = [t_interval(values) for values in draws]
    assert np.mean([low < 0 < high for low, high in intervals]) == pytest.approx(0.95, abs=0.015)


def test_scores_are_paired_by_seed_whatever_their_order():
    found = compare({1: 2.0, 0: 1.0, 5: 9.0}, {0: 1.0, 1: 1.5, 7: 3.0}, 4)
    assert found.differences == {0: 0.0, 1: 0.5}
    assert (found.mean, found.tried) == (0.25, 4)


def test_equal_differences_have_no_test_even_with_rounding_noise_and_small_ones_have_one():
    found = compare({s: 0.1 + s for s in range(4)}, {s: 0.3 + s for s in range(4)}, 4)
    assert found.mean == pytest.approx(-0.2)
    assert (found.p, found.t_interval) == (None, None)
    zeros, first = dict.fromkeys(range(4), 60.0), {0: 60.0, 1: 60.02, 2: 60.0, 3: 60.02}
    assert compare(first, zeros, 4).p == pytest.approx(stats.ttest_1samp((0, 1, 0, 1), 0).pvalue)


def test_holm_is_the_worked_example_of_those_tested_and_never_below_the_plain_value():
    # Holm 1979's procedure on four values: 4 x 0.005, 3 x 0.01, 2 x 0.03, 1 x 0.04 made monotonous
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.03, None, 0.01]) == [0.03, None, 0.02]
    values = np.random.default_rng(0).uniform(size=9)
    found = np.array(holm(values.tolist()))
    assert (found >= values).all()
    assert (found <= 1).all()
    assert (np.diff(found[np.argsort(values)]) >= 0).all()  # the order of the values, with ties
