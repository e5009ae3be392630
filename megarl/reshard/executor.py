"""Execution of a plan: pack a bucket, exchange it, unpack it, while the next bucket is being packed.

Nothing else travels or is allocated: apart from the two ends, a reshard needs two buckets to send and two to receive,
whatever the size of the model. One exchange is one non-blocking message per pair of ranks with bytes for each other.
It is the same on every backend, so tests over gloo cover the code that runs over NCCL. A message of one box that is
contiguous in memory is sent from there.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.columns import Integers
from megarl.reshard.checksums import ChecksumLog
from megarl.reshard.layout import Layout, Piece, row_major
from megarl.reshard.plan import Copy, RankPlan, Transfer, aligned
from megarl.reshard.proof import disagreement


class Destination(Protocol):
    """The receiver of a rank's boxes."""

    def layout(self) -> Layout:
        """Return the pieces that must be written."""
        ...

    def open(self, param: str) -> Tensor:
        """Return the local tensor to write to, before its first piece is written."""
        ...

    def close(self, param: str) -> None:
        """Finish the local tensor, after its last piece is written."""
        ...


@dataclass(frozen=True)
class SyncReport:
    """The bytes, the buffers and the time of one run on this rank."""

    bytes_sent: int
    bytes_received: int
    num_waves: int
    bucket_bytes: int  # of all buckets together
    seconds: float


@dataclass(frozen=True)
class PeerBuffers:
    """Transfers with their slots in a bucket; the slots of one peer are adjacent."""

    transfers: Sequence[Transfer]
    slots: list[Tensor]  # one per transfer, in its shape and wire dtype
    by_peer: Sequence[tuple[int, Tensor]]  # the bytes for or from each peer


def assign_slots(transfers: Sequence[Transfer], bucket: Tensor) -> PeerBuffers:
    """Give every transfer a slot in a bucket (uint8); both ends of a wave assign the same slots."""
    transfers = sorted(transfers, key=attrgetter("peer"))
    typed = {dtype: bucket.view(dtype) for dtype in {transfer.dtype for transfer in transfers}}
    slots = []
    by_peer = []
    end = 0
    for peer, group in groupby(transfers, key=attrgetter("peer")):
        start = end
        for transfer in group:
            shape = transfer.piece.box.shape
            slots.append(typed[transfer.dtype].as_strided(shape, row_major(shape), end // transfer.dtype.itemsize))
            end += aligned(transfer.num_bytes)
        by_peer.append((peer, bucket[start:end]))
    return PeerBuffers(transfers, slots, by_peer)


@dataclass(frozen=True)
class WaveBuffers:
    """A wave, ready to be packed, sent and unpacked."""

    sends: PeerBuffers
    receives: PeerBuffers
    copies: Sequence[Copy]


class Reshard:
    """A plan that is ready to run whenever the source has changed.

    Args:
        plan: of this rank; its ranks are the ranks of `group`.
        group: the process group, by default all ranks.
        device: of the buckets; NCCL needs CUDA, gloo the CPU.

    Raises:
        RuntimeError: the plans of the ranks differ.
    """

    def __init__(self, plan: RankPlan, *, group: dist.ProcessGroup | None = None, device: torch.device) -> None:
        self._plan = plan
        self._group = group
        self._device = device

        def buckets(sizes: Integers) -> list[Tensor]:
            # Odd and even waves use separate buckets, each no larger than necessary.
            largest = [int(sizes[parity::2].max(initial=0)) for parity in (0, 1)]
            return [torch.empty(num_bytes, dtype=torch.uint8, device=device) for num_bytes in largest]

        self._send_buckets, self._receive_buckets = map(buckets, plan.bucket_sizes())
        self._to_open, self._to_close = plan.lifetimes()
        self._to_read, self._to_release = plan.source_lifetimes()
        self._wave_buffers: list[WaveBuffers | None] = [None] * plan.num_waves  # filled on first use
        self._compare_plans()

    @torch.no_grad()
    def run(self, source: Mapping[str, Tensor], destination: Destination, *, check: bool = False) -> SyncReport:
        """Update the destination from the source. All ranks of the group must call this.

        Args:
            source: the local tensors of the source layout, by `Piece.param`. Each is asked for once, before its first
                wave, and released after its last, so a mapping may compute them.
            destination: each local tensor is opened before its first wave and closed after its last.
            check: compare checksums of every box on both ends; this reads all data twice more.

        Raises:
            SyncError: on all ranks, if `check` finds that the received data differ from the sent data.
        """
        start = time.perf_counter()
        opened: dict[str, Tensor] = {}
        read: dict[str, Tensor] = {}
        checksum_log = ChecksumLog(self._plan.rank) if check else None
        exchange: list[dist.Work] = []
        if self._plan.num_waves:
            read |= {param: source[param] for param in self._to_read[0]}
            exchange = self._exchange(0, self._pack(0, read, opened, checksum_log))
        for number in range(self._plan.num_waves):
            last = number + 1 == self._plan.num_waves
            if not last:
                read |= {param: source[param] for param in self._to_read[number + 1]}
                packed = self._pack(number + 1, read, opened, checksum_log)
            opened |= {param: destination.open(param) for param in self._to_open[number]}
            self._copy_own(number, read, opened, checksum_log)
            for work in exchange:
                work.wait()
            for param in self._to_release[number]:
                del read[param]
            if not last:
                exchange = self._exchange(number + 1, packed)
            self._unpack(number, opened, checksum_log)
            for param in self._to_close[number]:
                tensor = opened.pop(param)
                if checksum_log:
                    checksum_log.close(param, tensor)
                destination.close(param)
        if checksum_log:
            checksum_log.settle(self._group)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return SyncReport(
            bytes_sent=self._plan.bytes_sent,
            bytes_received=self._plan.bytes_received,
            num_waves=self._plan.num_waves,
            bucket_bytes=sum(map(len, self._send_buckets + self._receive_buckets)),
            seconds=time.perf_counter() - start,
        )

    def _buffers_of(self, number: int) -> WaveBuffers:
        """Return the expanded wave; expand it on first use."""
        wave_buffers = self._wave_buffers[number]
        if wave_buffers is None:
            wave = self._plan.wave(number)
            sends = assign_slots(wave.sends, self._send_buckets[number % 2])
            wave_buffers = WaveBuffers(
                sends, assign_slots(wave.receives, self._receive_buckets[number % 2]), wave.copies
            )
            self._wave_buffers[number] = wave_buffers
        return wave_buffers

    def _pack(
        self, number: int, source: Mapping[str, Tensor], opened: Mapping[str, Tensor], checksum_log: ChecksumLog | None
    ) -> list[tuple[int, Tensor]]:
        """Return the bytes for each peer."""
        peer_buffers = self._buffers_of(number).sends
        views = [_view(transfer.piece, opened if transfer.forwarded else source) for transfer in peer_buffers.transfers]
        if checksum_log:
            checksum_log.send(peer_buffers.transfers, views)
        num_boxes = Counter(transfer.peer for transfer in peer_buffers.transfers)
        ready = {
            transfer.peer: view.flatten().view(torch.uint8)
            for transfer, view in zip(peer_buffers.transfers, views, strict=True)
            if num_boxes[transfer.peer] == 1 and _is_message(transfer, view)
        }
        others = [place for place, transfer in enumerate(peer_buffers.transfers) if transfer.peer not in ready]
        _copy([peer_buffers.slots[place] for place in others], [views[place] for place in others])
        return [(peer, ready.get(peer, data)) for peer, data in peer_buffers.by_peer]

    def _copy_own(
        self, number: int, source: Mapping[str, Tensor], opened: Mapping[str, Tensor], checksum_log: ChecksumLog | None
    ) -> None:
        copies = self._buffers_of(number).copies
        if checksum_log:
            checksum_log.copy(copies, source)
        _copy([_view(copy.destination, opened) for copy in copies], [_view(copy.source, source) for copy in copies])

    def _unpack(self, number: int, opened: Mapping[str, Tensor], checksum_log: ChecksumLog | None) -> None:
        peer_buffers = self._buffers_of(number).receives
        if checksum_log:
            checksum_log.receive(peer_buffers.transfers)
        _copy([_view(transfer.piece, opened) for transfer in peer_buffers.transfers], peer_buffers.slots)

    def _exchange(self, number: int, packed: Sequence[tuple[int, Tensor]]) -> list[dist.Work]:
        messages = [
            dist.P2POp(operation, data, group=self._group, group_peer=peer)
            for operation, by_peer in ((dist.irecv, self._buffers_of(number).receives.by_peer), (dist.isend, packed))
            for peer, data in by_peer
        ]
        return dist.batch_isend_irecv(messages) if messages else []

    def _compare_plans(self) -> None:
        """Raise RuntimeError unless every rank is sent what it expects, in content and order."""
        total = torch.from_numpy(disagreement(self._plan)).to(self._device)
        # The first collective of a group must include all its ranks, before pairs of them exchange messages.
        dist.all_reduce(total, group=self._group)
        wrong = total.nonzero().flatten().tolist()
        if wrong:
            raise RuntimeError(f"the plans of the ranks differ: ranks {wrong} would not receive what they expect")


def _view(piece: Piece, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[piece.param]
    assert tensor.dtype == piece.dtype, f"{piece.param} is {tensor.dtype}, planned as {piece.dtype}"
    return piece.view(tensor)


def _is_message(transfer: Transfer, view: Tensor) -> bool:
    """Return whether the bytes of a box may be sent as they are: until all have arrived, nothing writes to a source."""
    is_whole = transfer.num_bytes == aligned(transfer.num_bytes)
    return is_whole and not transfer.forwarded and view.dtype == transfer.dtype and view.is_contiguous()


def _copy(destinations: list[Tensor], sources: list[Tensor]) -> None:
    if destinations:
        torch._foreach_copy_(destinations, sources)
