"""Parameters that lie in the equal shards of several ranks, and the rank that puts each of them together."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Pieces:
    """The elements of a parameter that each rank has, by their places in the parameter."""

    on_ranks: Mapping[int, range]

    @classmethod
    def cut(cls, start: int, end: int, *, shard: int) -> "Pieces":
        """Cut elements `start .. end` of a buffer in which each rank has the next `shard` elements."""
        ranks = range(start // shard, (end - 1) // shard + 1)
        return cls(
            {rank: range(max(start, rank * shard) - start, min(end, (rank + 1) * shard) - start) for rank in ranks}
        )

    @cached_property
    def owner(self) -> int:
        """The rank with the largest piece, the first of several; the others send it theirs."""
        return max(self.on_ranks, key=lambda rank: (len(self.on_ranks[rank]), -rank))

    def copied_by(self, rank: int) -> int:
        """Return the elements that a rank copies: all if it is the owner, else its piece."""
        if rank == self.owner:
            return sum(map(len, self.on_ranks.values()))
        return len(self.on_ranks.get(rank, ()))

    def place_in_copy(self, rank: int) -> slice:
        """Return where a rank's piece is in the elements that the rank copies."""
        piece = self.on_ranks[rank]
        return slice(piece.start, piece.stop) if rank == self.owner else slice(0, len(piece))
