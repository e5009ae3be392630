"""The records of a plan: what one rank copies, sends and receives, wave by wave.

Both ends of a transfer have it at the same position among the transfers of its wave between the same two ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megarl.reshard.layout import Piece


@dataclass(frozen=True, slots=True)
class Copy:
    """A box that stays on its rank; both pieces have the same box."""

    source: Piece
    destination: Piece


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box that travels: `piece` is its end on this rank, `peer` the rank at the other, `dtype` that on the wire."""

    piece: Piece
    peer: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.piece.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Wave:
    """What one rank does with one bucket."""

    copies: list[Copy] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)
    receives: list[Transfer] = field(default_factory=list)

    def written(self) -> Iterator[Piece]:
        """The pieces that this wave fills."""
        yield from (copy.destination for copy in self.copies)
        yield from (transfer.piece for transfer in self.receives)


@dataclass(frozen=True)
class RankPlan:
    """What one rank does. All ranks have the same number of waves; in a wave a rank may have nothing to do."""

    rank: int
    world_size: int
    waves: Sequence[Wave]

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank puts on the wire."""
        return sum(transfer.num_bytes for wave in self.waves for transfer in wave.sends)

    @property
    def bytes_received(self) -> int:
        """Bytes this rank takes off the wire."""
        return sum(transfer.num_bytes for wave in self.waves for transfer in wave.receives)
