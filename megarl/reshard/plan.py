"""The records of a plan: what one rank copies, sends and receives, wave by wave.

A plan is kept as columns of small integers and spelled out wave by wave, because the same few routes serve thousands of
parameters. Both ends of a transfer have it at the same position among the transfers of its wave between the same two
ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megarl.reshard.layout import Box, Integers, Layout, Piece

ALIGNMENT = 16  # bytes: where a box may begin in a bucket, so that any dtype can be viewed and copied in wide words
DELAY = 2  # waves before what has arrived can go onward: while a wave travels the next one is packed already

Choice = npt.NDArray[np.bool_]
Count = TypeVar("Count", int, Integers)


def aligned(num_bytes: Count) -> Count:
    """The bucket space of boxes of so many bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Copy:
    """A box that stays on its rank; both pieces have the same box."""

    source: Piece
    destination: Piece


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box that travels: `piece` is its end on this rank, `peer` the rank at the other, `dtype` that on the wire.

    What goes `onward` is sent from the destination's local tensor, where an earlier wave has written it.
    """

    piece: Piece
    peer: int
    dtype: torch.dtype
    onward: bool = False

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


@dataclass(frozen=True, slots=True)
class Template:
    """What the transfers of alike parameters have in common; `peer` is the rank itself where the box stays."""

    box: Box
    peer: int
    dtype: torch.dtype
    onward: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank does. All ranks have the same number of waves; in a wave a rank may have nothing to do.

    `steps` is int32 [num_steps, 3]: the number of the piece of `held` that is read, that of the piece of `needed` that
    is written (-1 where there is none on this rank), and that of the template. What goes onward is read from a piece
    of `needed`. Wave `w` has the steps from `ends[w - 1]` up to `ends[w]`.
    """

    rank: int
    world_size: int
    held: Layout
    needed: Layout
    templates: Sequence[Template]
    steps: npt.NDArray[np.int32]
    ends: Integers

    @property
    def num_waves(self) -> int:
        """How many buckets travel one after the other."""
        return len(self.ends)

    @property
    def waves(self) -> Iterator[Wave]:
        """The waves, each spelled out when it is its turn."""
        return map(self.wave, range(self.num_waves))

    def wave(self, number: int) -> Wave:
        """One wave, spelled out."""
        wave = Wave()
        begin = self.ends[number - 1] if number else 0
        for source, destination, number_of_template in self.steps[begin : self.ends[number]].tolist():
            template = self.templates[number_of_template]
            if template.onward:
                piece = self.needed[destination].part(template.box)
                wave.sends.append(Transfer(piece, template.peer, template.dtype, onward=True))
            elif destination < 0:
                piece = self.held[source].part(template.box)
                wave.sends.append(Transfer(piece, template.peer, template.dtype))
            elif source < 0:
                piece = self.needed[destination].part(template.box)
                wave.receives.append(Transfer(piece, template.peer, template.dtype))
            else:
                wave.copies.append(
                    Copy(self.held[source].part(template.box), self.needed[destination].part(template.box))
                )
        return wave

    def onward(self) -> Choice:
        """[num_steps]: whether the step sends what was received before."""
        return np.array([template.onward for template in self.templates], dtype=np.bool_)[self.steps[:, 2]]

    def sent(self) -> Choice:
        """[num_steps]: whether the step sends."""
        return (self.steps[:, 1] < 0) | self.onward()

    def received(self) -> Choice:
        """[num_steps]: whether the step receives."""
        return (self.steps[:, 0] < 0) & ~self.onward()

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank puts on the wire."""
        return int(self._num_bytes()[self.sent()].sum())

    @property
    def bytes_received(self) -> int:
        """Bytes this rank takes off the wire."""
        return int(self._num_bytes()[self.received()].sum())

    def bucket_sizes(self) -> Integers:
        """[2, num_waves]: the bytes of bucket that each wave needs to send, and to receive."""
        space = aligned(self._num_bytes())
        sizes = [np.concatenate([[0], np.cumsum(space * steps)])[self.ends] for steps in (self.sent(), self.received())]
        return np.diff(np.stack(sizes), prepend=0)

    def lifetimes(self) -> tuple[list[list[str]], list[list[str]]]:
        """For each wave the local tensors of the destination that it is first, and last, to write."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        begin = 0
        for number, end in enumerate(self.ends.tolist()):
            pieces = self.steps[begin:end, 1]
            for piece in pieces[pieces >= 0].tolist():
                param = self.needed[piece].param
                first.setdefault(param, number)
                last[param] = number
            begin = end
        return self._by_wave(first), self._by_wave(last)

    def _by_wave(self, waves: Mapping[str, int]) -> list[list[str]]:
        params: list[list[str]] = [[] for _ in self.ends]
        for param, number in waves.items():
            params[number].append(param)
        return params

    def _num_bytes(self) -> Integers:
        """[num_steps]: what each carries."""
        sizes = np.array([template.num_bytes for template in self.templates], dtype=np.int64)
        return sizes[self.steps[:, 2]]
