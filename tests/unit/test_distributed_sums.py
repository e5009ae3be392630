"""Exact sums, against fractions; and the largest and smallest of numbers."""

import math
from fractions import Fraction
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.distributed import sums
from megarl.distributed.sums import exact_sums, extremes

NUMBERS = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=12)
ANY = st.lists(st.floats(width=64), min_size=1, max_size=12)


def nearest(numbers: list[float]) -> float:
    total = sum(map(Fraction, numbers), Fraction(0))
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


@given(NUMBERS)
def test_sum_is_nearest_to_the_exact_one(numbers: list[float]) -> None:
    assert float(exact_sums(torch.tensor(numbers, dtype=torch.float64))) == nearest(numbers)


@given(ANY, st.randoms())
def test_order_and_split_leave_every_bit(numbers: list[float], random: Random) -> None:
    shuffled = random.sample(numbers, len(numbers))
    cut = random.randrange(len(numbers) + 1)
    column = torch.tensor(numbers, dtype=torch.float64)[:, None].numpy()
    moved = torch.tensor(shuffled, dtype=torch.float64)[:, None].numpy()
    parts = sums._digits(moved[:cut]) + sums._digits(moved[cut:])
    assert str(sums._nearest(parts[0])) == str(sums._nearest(sums._digits(column)[0]))


@given(ANY)
def test_numbers_that_are_not_finite_add_as_floats(numbers: list[float]) -> None:
    found = float(exact_sums(torch.tensor(numbers, dtype=torch.float64)))
    expected = nearest(numbers) if all(map(math.isfinite, numbers)) else sum(n for n in numbers if not math.isfinite(n))
    assert found == pytest.approx(expected, rel=0, nan_ok=True)


@given(ANY)
def test_extremes_equal_those_of_one_tensor(numbers: list[float]) -> None:
    column = torch.tensor(numbers, dtype=torch.float64)
    assert [float(each) for each in extremes(column)] == pytest.approx(
        [float(column.max()), float(column.min())], rel=0, nan_ok=True
    )


def test_columns_keep_their_shape() -> None:
    numbers = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    assert exact_sums(numbers).tolist() == numbers.double().sum(0).tolist()
    largest, smallest = extremes(numbers)
    assert (largest.tolist(), smallest.tolist()) == (numbers[1].tolist(), numbers[0].tolist())


def test_many_large_and_small_numbers_cancel() -> None:
    numbers = torch.tensor([1e308, 1.0, -1e308, 5e-324] * 10_000, dtype=torch.float64)
    assert float(exact_sums(numbers)) == 10_000.0


def test_sum_of_nothing_is_zero() -> None:
    assert exact_sums(torch.zeros(0, 2)).tolist() == [0.0, 0.0]
    assert [each.tolist() for each in extremes(torch.zeros(0, 1))] == [[-math.inf], [math.inf]]
