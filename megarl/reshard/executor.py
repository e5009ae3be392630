"""Runs a plan: pack a bucket, exchange it, unpack it, while the next one is being packed.

Nothing else travels and nothing else is allocated: beside the two ends a reshard needs two buckets to send and two to
receive, however large the model. One exchange is one non-blocking message per pair of ranks that have bytes for each
other, on every backend, so what a laptop tests over gloo is what runs over NCCL.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.reshard.checksums import Ledger
from megarl.reshard.layout import Layout, Piece, row_major
from megarl.reshard.plan import Copy, RankPlan, Transfer, aligned
from megarl.reshard.proof import disagreement


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
    """What one run moved over this rank's wires, what it had in memory for it, and how long the rank took."""

    bytes_sent: int
    bytes_received: int
    num_waves: int
    bucket_bytes: int  # of all buckets together
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
    typed = {dtype: bucket.view(dtype) for dtype in {transfer.dtype for transfer in transfers}}
    slots, by_peer, end = [], [], 0
    for peer, group in groupby(transfers, key=attrgetter("peer")):
        start = end
        for transfer in group:
            shape = transfer.piece.box.shape
            slots.append(typed[transfer.dtype].as_strided(shape, row_major(shape), end // transfer.dtype.itemsize))
            end += aligned(transfer.num_bytes)
        by_peer.append((peer, bucket[start:end]))
    return Cargo(transfers, slots, by_peer)


@dataclass(frozen=True)
class Load:
    """A wave, ready to be packed, sent and unpacked."""

    sends: Cargo
    receives: Cargo
    copies: Sequence[Copy]


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
        # The odd and the even waves have buckets of their own, no larger than they need.
        self._send_buckets, self._receive_buckets = (
            [torch.empty(int(sizes[parity::2].max(initial=0)), dtype=torch.uint8, device=device) for parity in (0, 1)]
            for sizes in plan.bucket_sizes()
        )
        self._to_open, self._to_close = plan.lifetimes()
        self._loads: list[Load | None] = [None] * plan.num_waves  # kept once they have been worked out
        self._compare_plans()

    @torch.no_grad()
    def run(self, source: Mapping[str, Tensor], destination: Destination, *, check: bool = False) -> SyncReport:
        """Bring the destination up to date with the source. All ranks of the group must call this.

        Args:
            source: the local tensors of the source layout, by `Piece.param`.
            destination: opened and closed once per local tensor, each only as long as its waves last.
            check: compare checksums of every box at both ends. It reads everything twice more.

        Raises:
            SyncError: on all ranks, where `check` finds that something else arrived than was sent.
        """
        start = time.perf_counter()
        opened: dict[str, Tensor] = {}
        ledger = Ledger(self._plan.rank) if check else None
        exchange: list[dist.Work] = []
        if self._plan.num_waves:
            self._pack(0, source, opened, ledger)
            exchange = self._exchange(0)
        for number in range(self._plan.num_waves):
            last = number + 1 == self._plan.num_waves
            if not last:
                self._pack(number + 1, source, opened, ledger)
            opened |= {param: destination.open(param) for param in self._to_open[number]}
            self._copy_own(number, source, opened, ledger)
            for work in exchange:
                work.wait()
            if not last:
                exchange = self._exchange(number + 1)
            self._unpack(number, opened, ledger)
            for param in self._to_close[number]:
                tensor = opened.pop(param)
                if ledger:
                    ledger.close(param, tensor)
                destination.close(param)
        if ledger:
            ledger.settle(self._group)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return SyncReport(
            bytes_sent=self._plan.bytes_sent,
            bytes_received=self._plan.bytes_received,
            num_waves=self._plan.num_waves,
            bucket_bytes=sum(map(len, self._send_buckets + self._receive_buckets)),
            seconds=time.perf_counter() - start,
        )

    def _load(self, number: int) -> Load:
        """A wave, spelled out."""
        load = self._loads[number]
        if load is None:
            wave = self._plan.wave(number)
            sends = stow(wave.sends, self._send_buckets[number % 2])
            load = Load(sends, stow(wave.receives, self._receive_buckets[number % 2]), wave.copies)
            self._loads[number] = load
        return load

    def _pack(
        self, number: int, source: Mapping[str, Tensor], opened: Mapping[str, Tensor], ledger: Ledger | None
    ) -> None:
        cargo = self._load(number).sends
        views = [_view(transfer.piece, opened if transfer.onward else source) for transfer in cargo.transfers]
        if ledger:
            ledger.send(cargo.transfers, views)
        _copy(cargo.slots, views)

    def _copy_own(
        self, number: int, source: Mapping[str, Tensor], opened: Mapping[str, Tensor], ledger: Ledger | None
    ) -> None:
        copies = self._load(number).copies
        if ledger:
            ledger.copy(copies, source)
        _copy([_view(copy.destination, opened) for copy in copies], [_view(copy.source, source) for copy in copies])

    def _unpack(self, number: int, opened: Mapping[str, Tensor], ledger: Ledger | None) -> None:
        cargo = self._load(number).receives
        if ledger:
            ledger.receive(cargo.transfers)
        _copy([_view(transfer.piece, opened) for transfer in cargo.transfers], cargo.slots)

    def _exchange(self, number: int) -> list[dist.Work]:
        load = self._load(number)
        messages = [
            dist.P2POp(operation, data, group=self._group, group_peer=peer)
            for operation, cargo in ((dist.irecv, load.receives), (dist.isend, load.sends))
            for peer, data in cargo.by_peer
        ]
        return dist.batch_isend_irecv(messages) if messages else []

    def _compare_plans(self) -> None:
        """Over all ranks, what is sent to each rank less what it expects must cancel, in content and order."""
        total = torch.from_numpy(disagreement(self._plan)).to(self._device)
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
