"""Random numbers without state: every draw is a pure function of the integers that name it.

Order and masks come from here, so that a run can stop at any step and go on in any number of
processes with the same numbers. The mixing function is splitmix64 (Steele, Lea, Flood 2014, "Fast
splittable pseudorandom number generators"); the permutation is a Feistel network over it.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Bits = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def random_bits(*names: ArrayLike) -> Bits:
    """64 random bits for every tuple of non-negative integers; arrays broadcast."""
    state: Bits = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        for name in names:
            state = _splitmix(state ^ np.asarray(name).astype(np.uint64))
    return state


def uniform(*names: ArrayLike) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 bits, named as in `bits`."""
    return (random_bits(*names) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(index: ArrayLike, size: int, *names: int) -> NDArray[np.int64]:
    """Where the permutation of range(size) with that name sends `index`; O(1) memory an index.

    Args:
        index: Integers in [0, size), any shape.
        size: Number of things permuted.
        *names: Integers naming the permutation, as (seed, epoch).

    Returns:
        As many integers, each hit once when `index` runs over range(size).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    keys = [random_bits(*names, turn) for turn in range(4)]
    value = np.array(index, dtype=np.uint64, ndmin=1)
    outside = np.ones(value.shape, bool)
    while outside.any():  # walk the cycle until inside: the domain is at most 4 times too large
        left, right = value[outside] >> half, value[outside] & low
        for key in keys:
            left, right = right, left ^ (random_bits(key, right) & low)
        value[outside] = (left << half) | right
        outside = value >= size
    return value.astype(np.int64).reshape(np.shape(index))


def _splitmix(state: Bits) -> Bits:
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
