"""The order of rows: every row once per epoch, from a seed and a position alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.order import MOST_DRAWN, Order, Position
from megarl.data.permutation import permuted


def order(num_rows: int, batch_size: int, *, shuffle: bool = True, seed: int = 1) -> Order:
    return Order(num_rows, batch_size=batch_size, shuffle=shuffle, seed=seed)


def walk(order: Order, position: Position, counts: list[int]) -> tuple[list[list[int]], Position]:
    """Return the rows that are taken, `counts` at a time, and the last position."""
    taken = []
    for count in counts:
        rows, position = order.take(position, count)
        taken.append(list(rows))
    return taken, position


def test_positions_by_hand() -> None:
    ten = order(10, 4, shuffle=False)
    taken, end = walk(ten, Position(), [4, 4, 4])
    assert taken == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]  # rows 8 and 9 fill no batch
    assert end == Position(1, 4)
    assert [ten.position_of(step) for step in range(4)] == [Position(), Position(0, 4), Position(1, 0), Position(1, 4)]
    taken, end = walk(ten, Position(), [6, 5, 5])  # 4 rows are left after the first six, too few for five
    assert taken == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert end == Position(2, 0)
    assert ten.take(Position(3, 50), 2) == (range(2), Position(4, 2))  # files that have become shorter


def test_more_rows_than_an_epoch_has() -> None:
    with pytest.raises(ValueError, match="is 4, so that a step draws 11 prompts, but the training files have 10 rows"):
        order(10, 4).take(Position(), 11)
    with pytest.raises(ValueError, match="data.train_batch_size is 11, but the training files have 10 rows"):
        _ = order(10, 11).steps_per_epoch


@given(st.integers(1, 40), st.data(), st.integers(-5, 5), st.booleans())
def test_batches_follow_order_of_steps(num_rows: int, data: st.DataObject, seed: int, shuffle: bool) -> None:
    batch_size = data.draw(st.integers(1, num_rows))
    rows = order(num_rows, batch_size, seed=seed, shuffle=shuffle)
    position = Position()
    for epoch in range(2):
        seen: list[int] = []
        for batch in range(rows.steps_per_epoch):
            assert position == rows.position_of(epoch * rows.steps_per_epoch + batch)
            taken, position = rows.take(position, batch_size)
            seen += taken
        assert len(set(seen)) == len(seen) == rows.steps_per_epoch * batch_size
        assert set(seen) <= set(range(num_rows))
    assert position == Position(2, 0)


@given(st.integers(1, 60), st.data(), st.integers(0, 3))
def test_every_row_once_per_epoch_whatever_the_portions(num_rows: int, data: st.DataObject, epoch: int) -> None:
    counts = []
    while sum(counts) < num_rows:
        counts.append(data.draw(st.integers(1, num_rows - sum(counts))))
    taken, _ = walk(order(num_rows, 1), Position(epoch), counts)
    assert sorted(sum(taken, [])) == list(range(num_rows))
    again, _ = walk(order(num_rows, 1), Position(epoch), [num_rows])
    assert sum(taken, []) == again[0]


def test_epoch_is_one_permutation_of_all_rows() -> None:
    taken, _ = walk(order(9, 3, seed=7), Position(3), [3, 3, 3])
    assert sum(taken, []) == np.random.default_rng((7, 3)).permutation(9).tolist()


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_permutation_has_every_number_once(count: int, seed: int, epoch: int) -> None:
    everything = permuted(np.arange(count), count, key=(seed, epoch))
    assert sorted(everything) == list(range(count))
    some = np.arange(0, count, 7)
    assert (permuted(some, count, key=(seed, epoch)) == everything[some]).all()


def test_numbers_are_spread_evenly() -> None:
    """Each tenth of a permutation has a tenth of each tenth of the numbers, within five standard deviations."""
    count = 200_000
    numbers = permuted(np.arange(count), count, key=(1, 0))
    table = np.histogram2d(np.arange(count), numbers, bins=10)[0]
    assert np.abs(table - count / 100).max() < 5 * (count / 100) ** 0.5
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / count**0.5


def test_an_epoch_of_more_rows_than_are_drawn() -> None:
    num_rows = MOST_DRAWN + 3
    taken, end = walk(order(num_rows, 1), Position(), [MOST_DRAWN, 3])
    assert sorted(sum(taken, [])) == list(range(num_rows)) and end == Position(1)
    assert taken[0][:100] != walk(order(num_rows, 1), Position(1), [100])[0][0]


def test_batches_of_ten_billion_rows() -> None:
    rows, end = order(10**10, 1024).take(Position(2, 5 * 10**9))
    assert len(set(rows)) == 1024 and max(rows) > 9 * 10**9 and end == Position(2, 5 * 10**9 + 1024)


def test_epochs_differ_and_are_repeatable() -> None:
    rows = order(200, 1)
    epochs = [list(rows.take(Position(epoch), 200)[0]) for epoch in (0, 1, 0)]
    assert epochs[0] != epochs[1] and epochs[0] == epochs[2]
