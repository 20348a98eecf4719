"""Stateless randomness: bijective, uniform, the same everywhere."""

import numpy as np
import pytest
from scipy import stats

from train import counter


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_permutation_hits_every_index_once(size):
    result = counter.permuted(np.arange(size), size, 5, 2)
    assert sorted(result.tolist()) == list(range(size))


def test_permutation_of_a_billion_needs_no_billion():
    size = 10**9
    index = np.array([0, 1, 17, size - 1])
    result = counter.permuted(index, size, 0, 0)
    assert len(set(result.tolist())) == 4
    assert (result >= 0).all()
    assert (result < size).all()
    again = counter.permuted(17, size, 0, 0)
    assert again == result[2]


def test_permutations_of_different_epochs_differ_and_look_random():
    first, second = (counter.permuted(np.arange(1000), 1000, 0, epoch) for epoch in (0, 1))
    assert (first == second).sum() < 10
    assert abs(stats.spearmanr(np.arange(1000), first).statistic) < 0.1
    assert abs(stats.spearmanr(first, second).statistic) < 0.1


def test_uniform_numbers_are_uniform_and_independent_along_every_name():
    draws = counter.uniform(0, np.arange(300)[:, None], np.arange(300))
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 0.001
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.02


def test_draws_are_named_by_order_as_well_as_value():
    assert counter.bits(1, 2) != counter.bits(2, 1)
    assert counter.bits(0) != counter.bits(0, 0)
    assert counter.bits(3, np.arange(4))[2] == counter.bits(3, 2)
