"""Pieces of parameters in shards: by hand, and each element copied by its owner and at most once elsewhere."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from megarl.distributed.pieces import Pieces


def test_pieces_by_hand() -> None:
    assert Pieces.cut(3, 7, shard=10).on_ranks == {0: range(4)}
    over_three = Pieces.cut(8, 25, shard=10)
    assert over_three.on_ranks == {0: range(2), 1: range(2, 12), 2: range(12, 17)}
    assert over_three.owner == 1
    assert [over_three.copied_by(rank) for rank in range(4)] == [2, 17, 5, 0]
    assert [over_three.place_in_copy(rank) for rank in range(3)] == [slice(0, 2), slice(2, 12), slice(0, 5)]
    assert Pieces.cut(5, 15, shard=10).owner == 0  # the first of two equal pieces


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 8))
def test_each_element_has_one_owner(lengths: list[int], num_ranks: int) -> None:
    ends = list(accumulate(lengths, initial=0))
    shard = -(-ends[-1] // num_ranks)
    for start, end in pairwise(ends):
        pieces = Pieces.cut(start, end, shard=shard)
        held = [place for rank in sorted(pieces.on_ranks) for place in pieces.on_ranks[rank]]
        assert held == list(range(end - start))
        assert all((start + piece.start) // shard == rank for rank, piece in pieces.on_ranks.items())
        assert len(pieces.on_ranks[pieces.owner]) == max(map(len, pieces.on_ranks.values()))
        assert sum(pieces.copied_by(rank) for rank in range(num_ranks)) == 2 * (end - start) - len(
            pieces.on_ranks[pieces.owner]
        )
