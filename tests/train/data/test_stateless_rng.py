"""Stateless randomness: bijective, uniform, the same everywhere."""

import numpy as np
import pytest
from scipy import stats

from train.data import stateless_rng


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097, 10**9])
def test_permutation_hits_every_index_once(size):
    # of a billion half a million in a row, half a million scattered: chance would repeat about 500
    scattered = np.random.default_rng(0).integers(size, size=2**19)
    index = np.union1d(np.arange(min(size, 2**19)), scattered)
    found = stateless_rng.permute(index, size, 5, 2)
    assert len(np.unique(found)) == len(index)
    assert 0 <= found.min() <= found.max() < size


def test_permutations_of_different_epochs_differ_and_look_random():
    first, second = (stateless_rng.permute(np.arange(1000), 1000, 0, epoch) for epoch in (0, 1))
    assert (first == second).sum() < 10
    assert abs(stats.spearmanr(np.arange(1000), first).statistic) < 0.1
    assert abs(stats.spearmanr(first, second).statistic) < 0.1


def test_uniform_numbers_are_uniform_and_independent_along_every_name():
    draws = stateless_rng.uniform(0, np.arange(300)[:, None], np.arange(300))
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 0.001
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.02


def test_draws_are_named_by_order_as_well_as_value():
    assert stateless_rng.random_bits(1, 2) != stateless_rng.random_bits(2, 1)
    assert stateless_rng.random_bits(0) != stateless_rng.random_bits(0, 0)
    assert stateless_rng.random_bits(3, np.arange(4))[2] == stateless_rng.random_bits(3, 2)
