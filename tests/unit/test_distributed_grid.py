"""Numbers that are added along each ring of a grid are the sums of all ranks."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.distributed.grid import MOST, dimensions, prime_factors, rings

NUMBERS = st.integers(1, 300)


@pytest.mark.parametrize(
    ("num_ranks", "sizes"),
    [
        (1, []),
        (2, [2]),
        (16, [16]),
        (17, [17]),
        (24, [8, 3]),
        (64, [16, 4]),
        (2048, [16, 16, 8]),
        (10240, [16, 16, 8, 5]),
    ],
)
def test_rings_have_few_ranks(num_ranks: int, sizes: list[int]) -> None:
    assert dimensions(num_ranks) == sizes


@given(NUMBERS)
def test_dimensions_multiply_to_all_ranks(num_ranks: int) -> None:
    sizes = dimensions(num_ranks)
    assert prod(sizes) == num_ranks
    assert max(sizes, default=1) <= max(MOST, *prime_factors(num_ranks), 1)


@given(NUMBERS)
def test_sums_along_rings_are_those_of_all_ranks(num_ranks: int) -> None:
    of_ranks = [rings(num_ranks, rank) for rank in range(num_ranks)]
    numbers = [rank * rank for rank in range(num_ranks)]
    expected = [sum(numbers)] * num_ranks
    for dimension in range(len(dimensions(num_ranks))):
        members = [of_rank[dimension] for of_rank in of_ranks]
        assert all(rank in ring and all(members[other] == ring for other in ring) for rank, ring in enumerate(members))
        numbers = [sum(numbers[other] for other in ring) for ring in members]
    assert numbers == expected
