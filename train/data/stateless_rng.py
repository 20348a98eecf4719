"""Stateless random numbers: each is a pure function of a few integers, its key.

The order of the text and the masks are drawn from here, so that a run can stop after any step and
continue, in any number of processes, with the same numbers. The mixing function is splitmix64
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"); permutations are
Feistel networks over it.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Bits = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def random_bits(*key: ArrayLike) -> Bits:
    """Draw 64 random bits for each key, a tuple of non-negative integers; arrays broadcast."""
    state: Bits = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
        for number in key:
            state = _splitmix(state ^ np.asarray(number).astype(np.uint64))
    return state


def derive_seed(*key: int) -> int:
    """Draw a seed of 63 bits, as `torch.manual_seed` takes it, with a key as in `random_bits`."""
    return int(random_bits(*key)) >> 1


def uniform(*key: ArrayLike) -> NDArray[np.float64]:
    """Draw uniform numbers in [0, 1) with 53 bits, with keys as in `random_bits`."""
    return (random_bits(*key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(index: ArrayLike, size: int, *key: int) -> NDArray[np.int64]:
    """Apply a random permutation of range(size) to indices of any shape, in O(1) memory for each.

    The key selects the permutation, for example (seed, epoch).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    round_keys = [random_bits(*key, number) for number in range(4)]
    value = np.array(index, dtype=np.uint64, ndmin=1)
    outside = np.ones(value.shape, bool)
    # the network permutes at most 4 * size integers: apply it until the result is below size
    while outside.any():
        left, right = value[outside] >> half, value[outside] & low
        for round_key in round_keys:
            left, right = right, left ^ (random_bits(round_key, right) & low)
        value[outside] = (left << half) | right
        outside = value >= size
    return value.astype(np.int64).reshape(np.shape(index))


def _splitmix(state: Bits) -> Bits:
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
