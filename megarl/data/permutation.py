"""A random order of many numbers; any part of it is computed without the rest."""

import numpy as np
from numpy.typing import NDArray

from megarl.platform.hashing import hashed

ROUNDS = 6


def permuted(places: NDArray[np.int64], count: int, *, key: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the numbers at some places of a random order of `range(count)`; the cost does not depend on `count`.

    The permutation is a balanced Feistel network over at most `4 * count` numbers. A number outside of the range is
    permuted again until it is inside (cycle walking; Black and Rogaway 2002, Ciphers with arbitrary finite domains).

    Args:
        places: int64 of any shape, each in `range(count)`.
        count: the numbers of the order.
        key: whole numbers that choose the permutation, none negative.
    """
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    rounds = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    found = _network(places.astype(np.uint64), half, rounds)
    outside = found >= count
    while outside.any():
        found[outside] = _network(found[outside], half, rounds)
        outside = found >= count
    return found.astype(np.int64)


def _network(numbers: NDArray[np.uint64], half: np.uint64, rounds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute numbers of `2 * half` bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left = numbers >> half
    right = numbers & mask
    for of_round in rounds:
        left, right = right, left ^ (hashed(right ^ of_round) & mask)
    return (left << half) | right
