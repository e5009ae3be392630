"""The order of rows: every row once per epoch, from a seed and a position alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.order import Chunk, Order, Position


def order(num_rows: int, batch_size: int, *, shuffle: bool = True, seed: int = 1) -> Order:
    return Order([Chunk(num_rows=num_rows, num_bytes=1)], batch_size=batch_size, shuffle=shuffle, seed=seed)


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
    with pytest.raises(ValueError, match="data.train_batch_size is 11, but the training files have 10 rows"):
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


def chunked(sizes: list[int], batch_size: int, *, window: int, seed: int = 1) -> Order:
    """Return the order of chunks with these numbers of rows, and as many bytes, in windows of `window` bytes."""
    chunks = [Chunk(num_rows=size, num_bytes=size) for size in sizes]
    return Order(chunks, batch_size=batch_size, shuffle=True, seed=seed, window_bytes=window)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 40), st.data(), st.integers(0, 3))
def test_every_row_once_per_epoch_whatever_the_windows(
    sizes: list[int], window: int, data: st.DataObject, epoch: int
) -> None:
    num_rows = sum(sizes)
    counts = []
    while sum(counts) < num_rows:
        counts.append(data.draw(st.integers(1, num_rows - sum(counts))))
    taken, _ = walk(chunked(sizes, 1, window=window), Position(epoch), counts)
    assert sorted(sum(taken, [])) == list(range(num_rows))
    again, _ = walk(chunked(sizes, 1, window=window), Position(epoch), [num_rows])
    assert sum(taken, []) == again[0]  # the order is the same for all portions and readers


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 40))
def test_a_window_fits_or_is_one_chunk(sizes: list[int], window: int) -> None:
    (rows,), _ = walk(chunked(sizes, 1, window=window), Position(), [sum(sizes)])
    ends = np.cumsum(sizes)
    chunk_of = [int(np.searchsorted(ends, row, side="right")) for row in rows]
    # the memory of a reader: a chunk is open from its first row to its last
    open_from = {chunk: chunk_of.index(chunk) for chunk in chunk_of}
    open_to = {chunk: len(rows) - 1 - chunk_of[::-1].index(chunk) for chunk in chunk_of}
    for place in range(len(rows)):
        held = [sizes[chunk] for chunk in open_from if open_from[chunk] <= place <= open_to[chunk]]
        assert sum(held) <= window or len(held) == 1


def test_rows_within_one_window_are_shuffled_together() -> None:
    shuffled = np.random.default_rng((7, 3)).permutation(9).tolist()
    for sizes in ([9], [4, 5], [1] * 9):
        taken, _ = walk(chunked(sizes, 3, window=9, seed=7), Position(3), [3, 3, 3])
        assert sum(taken, []) == shuffled


def test_windows_mix_distant_chunks_and_differ_between_epochs() -> None:
    order = chunked([10] * 20, 1, window=50)
    firsts = []
    for epoch in range(2):
        rows, _ = order.take(Position(epoch), 50)
        chunks = [row // 10 for row in rows]
        assert len(set(chunks)) == 5 and max(chunks) - min(chunks) > 5
        assert len(set(chunks[:10])) > 1
        firsts.append(rows)
    assert firsts[0] != firsts[1]
