"""Places all ranks in a grid, so that what passes around each of its rings passes around few ranks.

gloo reduces numbers around a ring: two messages for each rank of it, one after the other. Reduced along one dimension
of a grid after the other, numbers take a time that grows with the logarithm of the ranks.
"""

from collections.abc import Sequence

MOST = 16
"""Ranks of a ring, unless the number of ranks has a larger prime factor."""


def dimensions(num_ranks: int) -> list[int]:
    """Return the sizes of a grid of `num_ranks` ranks, neighbours first."""
    sizes = [1]
    for factor in prime_factors(num_ranks):
        if sizes[-1] * factor <= MOST:
            sizes[-1] *= factor
        else:
            sizes.append(factor)
    return [size for size in sizes if size > 1]


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a positive number, ascending."""
    factors = list[int]()
    factor = 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            factors.append(factor)
            number //= factor
    return [*factors, number] if number > 1 else factors


def rings(num_ranks: int, rank: int) -> list[Sequence[int]]:
    """Return for each dimension of the grid the ranks whose places differ from that of `rank` in it alone."""
    found = list[Sequence[int]]()
    stride = 1
    for size in dimensions(num_ranks):
        first = rank - rank // stride % size * stride
        found.append(range(first, first + size * stride, stride))
        stride *= size
    return found
