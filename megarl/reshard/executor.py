"""Runs a plan: pack a bucket, exchange it, unpack it, while the next one is being packed.

Nothing else travels and nothing else is allocated: beside the two ends a reshard needs two buckets to send and two to
receive, however large the model. One exchange is one non-blocking message per pair of ranks that have bytes for each
other, on every backend, so what a laptop tests over gloo is what runs over NCCL.
"""

import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.reshard.layout import Layout, Piece
from megarl.reshard.plan import RankPlan, Transfer
from megarl.reshard.routes import aligned


class Destination(Protocol):
    """Where a rank's boxes go."""

    def layout(self) -> Layout:
        """What must be written."""
        ...

    def open(self, param: str) -> Tensor:
        """The local tensor to write to, before its first piece is written."""
        ...

    def close(self, param: str) -> None:
        """All pieces of the local tensor are written."""
        ...


@dataclass(frozen=True)
class TensorDestination:
    """A destination whose local tensors are simply there."""

    pieces: Layout
    tensors: Mapping[str, Tensor]

    def layout(self) -> Layout:
        """The pieces."""
        return self.pieces

    def open(self, param: str) -> Tensor:
        """The tensor itself."""
        return self.tensors[param]

    def close(self, param: str) -> None:
        """Nothing is left to do."""


@dataclass(frozen=True)
class SyncReport:
    """What one run moved over this rank's wires, and how long the rank took."""

    bytes_sent: int
    bytes_received: int
    num_waves: int
    seconds: float


@dataclass(frozen=True)
class Cargo:
    """Transfers stowed in a bucket, those of one peer side by side."""

    transfers: Sequence[Transfer]
    slots: list[Tensor]  # the place of each transfer, in its shape and wire type
    by_peer: Sequence[tuple[int, Tensor]]  # the bytes for or from each peer


def stow(transfers: Sequence[Transfer], bucket: Tensor) -> Cargo:
    """Give every transfer its place in a bucket (uint8); both ends of a wave stow alike."""
    transfers = sorted(transfers, key=attrgetter("peer"))
    slots, by_peer, end = [], [], 0
    for peer, group in groupby(transfers, key=attrgetter("peer")):
        start = end
        for transfer in group:
            slots.append(bucket[end : end + transfer.num_bytes].view(transfer.dtype).view(transfer.piece.box.shape))
            end += aligned(transfer.num_bytes)
        by_peer.append((peer, bucket[start:end]))
    return Cargo(transfers, slots, by_peer)


class Reshard:
    """A plan ready to run, as often as the source changes.

    Args:
        plan: of this rank; its ranks are those of `group`.
        group: the process group, by default the world.
        device: where the buckets live; NCCL needs CUDA, gloo the CPU.

    Raises:
        RuntimeError: the plans of the group's ranks do not belong together.
    """

    def __init__(self, plan: RankPlan, *, group: dist.ProcessGroup | None = None, device: torch.device) -> None:
        self._plan, self._group, self._device = plan, group, device
        self._sends = self._stow_all([wave.sends for wave in plan.waves])
        self._receives = self._stow_all([wave.receives for wave in plan.waves])
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for number, wave in enumerate(plan.waves):
            for piece in wave.written():
                first.setdefault(piece.param, number)
                last[piece.param] = number
        self._to_open = [[param for param, at in first.items() if at == number] for number in range(len(plan.waves))]
        self._to_close = [[param for param, at in last.items() if at == number] for number in range(len(plan.waves))]
        self._compare_plans()

    @torch.no_grad()
    def run(self, source: Mapping[str, Tensor], destination: Destination) -> SyncReport:
        """Bring the destination up to date with the source. All ranks of the group must call this.

        Args:
            source: the local tensors of the source layout, by `Piece.param`.
            destination: opened and closed once per local tensor, each only as long as its waves last.
        """
        start = time.perf_counter()
        opened: dict[str, Tensor] = {}
        num_waves = len(self._plan.waves)
        exchange: list[dist.Work] = []
        if num_waves:
            self._pack(0, source)
            exchange = self._exchange(0)
        for number, wave in enumerate(self._plan.waves):
            if number + 1 < num_waves:
                self._pack(number + 1, source)
            opened |= {param: destination.open(param) for param in self._to_open[number]}
            _copy(
                [_view(copy.destination, opened) for copy in wave.copies],
                [_view(copy.source, source) for copy in wave.copies],
            )
            for work in exchange:
                work.wait()
            if number + 1 < num_waves:
                exchange = self._exchange(number + 1)
            cargo = self._receives[number]
            _copy([_view(transfer.piece, opened) for transfer in cargo.transfers], cargo.slots)
            for param in self._to_close[number]:
                del opened[param]
                destination.close(param)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return SyncReport(
            self._plan.bytes_sent, self._plan.bytes_received, num_waves, seconds=time.perf_counter() - start
        )

    def _stow_all(self, waves: Sequence[Sequence[Transfer]]) -> list[Cargo]:
        """Stow each wave, the odd and the even ones in a bucket of their own, no larger than they need."""
        sizes = [sum(aligned(transfer.num_bytes) for transfer in transfers) for transfers in waves]
        buckets = [
            torch.empty(max(sizes[parity::2], default=0), dtype=torch.uint8, device=self._device) for parity in (0, 1)
        ]
        return [stow(transfers, buckets[number % 2]) for number, transfers in enumerate(waves)]

    def _pack(self, number: int, source: Mapping[str, Tensor]) -> None:
        cargo = self._sends[number]
        _copy(cargo.slots, [_view(transfer.piece, source) for transfer in cargo.transfers])

    def _exchange(self, number: int) -> list[dist.Work]:
        messages = [
            dist.P2POp(operation, data, group=self._group, group_peer=peer)
            for operation, cargo in ((dist.irecv, self._receives[number]), (dist.isend, self._sends[number]))
            for peer, data in cargo.by_peer
        ]
        return dist.batch_isend_irecv(messages) if messages else []

    def _compare_plans(self) -> None:
        """Over all ranks, what is sent to each rank less what it expects must cancel, in content and order."""
        balance = [0] * self._plan.world_size
        for number in range(len(self._plan.waves)):
            for sign, side in ((1, self._sends), (-1, self._receives)):
                position: Counter[int] = Counter()
                for transfer in side[number].transfers:
                    pair = (self._plan.rank, transfer.peer)[::sign]
                    position[transfer.peer] += 1
                    parcel = (number, position[transfer.peer], pair, transfer.piece.name, transfer.dtype)
                    balance[pair[1]] += sign * zlib.crc32(f"{parcel} {transfer.piece.box}".encode())
        total = torch.tensor(balance, dtype=torch.int64, device=self._device)
        # The first collective of a group has to be one of all its ranks before some of them may talk in pairs.
        dist.all_reduce(total, group=self._group)
        if wrong := total.nonzero().flatten().tolist():
            raise RuntimeError(f"what is sent to ranks {wrong} is not what they expect: the ranks have different plans")


def _view(piece: Piece, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[piece.param]
    assert tensor.dtype == piece.dtype, f"{piece.param} is {tensor.dtype}, planned as {piece.dtype}"
    return piece.view(tensor)


def _copy(destinations: list[Tensor], sources: list[Tensor]) -> None:
    if destinations:
        torch._foreach_copy_(destinations, sources)
