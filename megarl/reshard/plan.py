"""The records of a plan: what one rank copies, sends and receives, wave by wave.

A plan is stored as columns of small integers and expanded wave by wave, because the same few moves serve thousands of
parameters. A transfer has the same position on both ends among the transfers of its wave between these two ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megarl.columns import Integers
from megarl.reshard.layout import Box, Layout, Piece

ALIGNMENT = 16
"""Bytes: each box in a bucket begins at a multiple, so that any dtype can be viewed and copied in wide words."""
DELAY = 2  # waves before received data can be forwarded: while a wave travels the next wave is already packed

Choice = npt.NDArray[np.bool_]
IntOrColumn = TypeVar("IntOrColumn", int, Integers)


def aligned(num_bytes: IntOrColumn) -> IntOrColumn:
    """Return the bytes of a bucket that a box of `num_bytes` takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Copy:
    """A box that stays on its rank; both pieces have the same box."""

    source: Piece
    destination: Piece


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box that travels: `piece` is the end on this rank, `peer` the rank of the other end, `dtype` that of the wire.

    A `forwarded` transfer is sent from the destination's local tensor, after an earlier wave has written it.
    """

    piece: Piece
    peer: int
    dtype: torch.dtype
    forwarded: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.piece.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Wave:
    """The work of one rank on one bucket."""

    copies: list[Copy] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)
    receives: list[Transfer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Template:
    """The common part of the transfers of alike parameters; `peer` is the rank itself if the box stays."""

    box: Box
    peer: int
    dtype: torch.dtype
    forwarded: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The plan of one rank. All ranks have the same number of waves; in a wave a rank may have nothing to do.

    `steps` is int32 [num_steps, 3]: the number of the piece of `held` that is read, the number of the piece of `needed`
    that is written (-1 if it is not on this rank), and the number of the template. A forwarded step reads from the
    piece of `needed`. Wave `w` has the steps from `ends[w - 1]` up to `ends[w]`.
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
        """The number of buckets that travel one after the other."""
        return len(self.ends)

    @property
    def waves(self) -> Iterator[Wave]:
        """The waves, each expanded on demand."""
        return map(self.wave, range(self.num_waves))

    def wave(self, number: int) -> Wave:
        """Expand one wave."""
        wave = Wave()
        begin = self.ends[number - 1] if number else 0
        for source, destination, number_of_template in self.steps[begin : self.ends[number]].tolist():
            template = self.templates[number_of_template]
            if template.forwarded:
                piece = self.needed[destination].part(template.box)
                wave.sends.append(Transfer(piece, template.peer, template.dtype, forwarded=True))
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

    def forwarded(self) -> Choice:
        """Return [num_steps]: whether the step forwards what was received before."""
        return np.array([template.forwarded for template in self.templates], dtype=np.bool_)[self.steps[:, 2]]

    def sent(self) -> Choice:
        """Return [num_steps]: whether the step sends."""
        return (self.steps[:, 1] < 0) | self.forwarded()

    def received(self) -> Choice:
        """Return [num_steps]: whether the step receives."""
        return (self.steps[:, 0] < 0) & ~self.forwarded()

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank sends."""
        return int(self._num_bytes()[self.sent()].sum())

    @property
    def bytes_received(self) -> int:
        """The bytes that this rank receives."""
        return int(self._num_bytes()[self.received()].sum())

    def bucket_sizes(self) -> Integers:
        """Return [2, num_waves]: the bytes of bucket that each wave needs to send, and to receive."""
        space = aligned(self._num_bytes()) * np.stack([self.sent(), self.received()])
        totals = np.cumsum(np.pad(space, ((0, 0), (1, 0))), axis=1)
        return np.diff(totals[:, self.ends], prepend=0)

    def lifetimes(self) -> tuple[list[list[str]], list[list[str]]]:
        """Return for each wave the local tensors of the destination that it is the first, and the last, to write."""
        return self._lifetimes(self.steps[:, 1], self.needed)

    def source_lifetimes(self) -> tuple[list[list[str]], list[list[str]]]:
        """Return for each wave the local tensors of the source that it is the first, and the last, to read."""
        return self._lifetimes(np.where(self.forwarded(), -1, self.steps[:, 0]), self.held)

    def _lifetimes(self, pieces: npt.NDArray[np.int32], layout: Layout) -> tuple[list[list[str]], list[list[str]]]:
        """Return for each wave the tensors that it is the first, and the last, to use; -1: a step uses none."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        begin = 0
        for number, end in enumerate(self.ends.tolist()):
            of_wave = pieces[begin:end]
            for piece in of_wave[of_wave >= 0].tolist():
                param = layout[piece].param
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
        """Return [num_steps]: the bytes of each step."""
        sizes = np.array([template.num_bytes for template in self.templates], dtype=np.int64)
        return sizes[self.steps[:, 2]]
