"""Checksums of every box on both ends, which show whether the received data equal the sent data.

The sender computes a checksum from its local tensor before packing, the reader from its local tensor once the tensor is
complete. So the comparison covers packing, transfer and unpacking, and writes to a wrong place.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.exchange import host_group
from megarl.reshard.layout import Piece
from megarl.reshard.plan import Copy, Transfer

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> integer type
BLOCK = 1 << 18  # elements per step, which bounds the memory needed
MOST_NAMED = 5  # most faults that an error lists


class SyncError(RuntimeError):
    """Received data that differ from the sent data."""


def checksum(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of `(2 i + 1) word[i]` modulo 2^64 over the elements as words of `dtype`; int64, no dimensions.

    All weights are odd, so every change of a single word is detected. All weights differ, so every exchange of two
    different words of at most 32 bits is detected in a box of less than 2^31 elements.
    """
    rows = tensor if tensor.dim() else tensor.view(1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    first = 0
    for block in rows.split(max(1, BLOCK * len(rows) // rows.numel())):
        words = block.to(dtype).reshape(-1).view(WORDS[dtype.itemsize])
        weights = torch.arange(first, first + len(words), device=tensor.device) * 2 + 1
        first += len(words)
        total += weights.mul_(words).sum()
    return total


class ChecksumLog:
    """The checksums of one run: of the boxes that this rank sends, and of the boxes that it writes."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sent: dict[int, list[Tensor]] = defaultdict(list)  # by reader; all lists are in the order of the plan
        self._to_write: dict[str, list[tuple[int, int, Piece, torch.dtype]]] = defaultdict(list)
        self._written: dict[int, list[tuple[Piece, Tensor | None]]] = defaultdict(list)  # by sender

    def send(self, transfers: Sequence[Transfer], views: Sequence[Tensor]) -> None:
        """Record boxes that leave the rank."""
        for transfer, view in zip(transfers, views, strict=True):
            self._sent[transfer.peer].append(checksum(view, transfer.dtype))

    def copy(self, copies: Sequence[Copy], source: Mapping[str, Tensor]) -> None:
        """Record boxes that are copied on this rank."""
        for copy in copies:
            dtype = min(copy.destination.dtype, copy.source.dtype, key=lambda dtype: dtype.itemsize)
            self._sent[self._rank].append(checksum(copy.source.view(source[copy.source.param]), dtype))
            self._await(copy.destination, self._rank, dtype)

    def receive(self, transfers: Sequence[Transfer]) -> None:
        """Record boxes that were received."""
        for transfer in transfers:
            self._await(transfer.piece, transfer.peer, transfer.dtype)

    def _await(self, piece: Piece, sender: int, dtype: torch.dtype) -> None:
        self._to_write[piece.param].append((sender, len(self._written[sender]), piece, dtype))
        self._written[sender].append((piece, None))

    def close(self, param: str, tensor: Tensor) -> None:
        """Compute the checksums of a complete local tensor."""
        for sender, position, piece, dtype in self._to_write.pop(param):
            self._written[sender][position] = piece, checksum(piece.view(tensor), dtype)

    def settle(self, group: dist.ProcessGroup | None) -> None:
        """Compare with the checksums of the other ranks.

        Raises:
            SyncError: on all ranks, with the first boxes that differ on any rank.
        """
        assert not self._to_write, f"{min(self._to_write)} is not closed"
        sent = {reader: torch.stack(values) for reader, values in sorted(self._sent.items())}
        found = dict[int, Tensor]()
        expected = dict[int, Tensor]()
        messages = list[dist.P2POp]()
        for sender, boxes in sorted(self._written.items()):
            found[sender] = torch.stack([value for _, value in boxes if value is not None])
            expected[sender] = torch.empty_like(found[sender])
            if sender == self._rank:
                expected[sender] = sent[sender]
            else:
                messages.append(dist.P2POp(dist.irecv, expected[sender], group=group, group_peer=sender))
        for reader, values in sent.items():
            if reader != self._rank:
                messages.append(dist.P2POp(dist.isend, values, group=group, group_peer=reader))
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        self._raise(found, expected, group)

    def _raise(
        self, found: Mapping[int, Tensor], expected: Mapping[int, Tensor], group: dist.ProcessGroup | None
    ) -> None:
        wrong = list[str]()
        for sender, values in found.items():
            for position in (values != expected[sender]).nonzero().flatten().tolist():
                piece, _ = self._written[sender][position]
                wrong.append(f"{piece.name} {piece.box} from rank {sender} to rank {self._rank}")
        faults: list[list[str]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(faults, wrong[:MOST_NAMED], group=group or host_group())
        named = [fault for of_rank in faults for fault in of_rank]
        if named:
            raise SyncError(f"received data differ from the sent data: {'; '.join(named[:MOST_NAMED])}")
