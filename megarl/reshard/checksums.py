"""Whether what arrived is what was sent: a checksum of every box at both ends.

The sender's is taken from its local tensor before the box is packed, the reader's from its own local tensor when all of
that is written. So it covers packing, wire and unpacking, and whatever is written to a wrong place.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.reshard.layout import Piece
from megarl.reshard.plan import Copy, Transfer

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
BLOCK = 1 << 18  # elements whose checksum is taken at once, which bounds the memory it takes
MOST_NAMED = 5  # faults that an error lists


class SyncError(RuntimeError):
    """What arrived is not what was sent."""


def checksum(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of `(2 i + 1) word[i]` modulo 2^64 over the tensor's elements as words of `dtype`; int64, no dimensions.

    Every weight is odd, so no change of a single word goes unseen; no two weights are equal, so no exchange of two
    different words of at most 32 bits does in a box of less than 2^31 elements.
    """
    rows = tensor if tensor.dim() else tensor.view(1)
    total, first = torch.zeros((), dtype=torch.int64, device=tensor.device), 0
    for block in rows.split(max(1, BLOCK * len(rows) // rows.numel())):
        words = block.to(dtype).reshape(-1).view(WORDS[dtype.itemsize])
        weights = torch.arange(first, first := first + len(words), device=tensor.device) * 2 + 1
        total += weights.mul_(words).sum()
    return total


class Ledger:
    """The checksums of one run: of what this rank sends, and of what it writes."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sent: dict[int, list[Tensor]] = defaultdict(list)  # by reader, as everything here in the plan's order
        self._to_write: dict[str, list[tuple[int, int, Piece, torch.dtype]]] = defaultdict(list)
        self._written: dict[int, list[tuple[Piece, Tensor | None]]] = defaultdict(list)  # by sender

    def send(self, transfers: Sequence[Transfer], views: Sequence[Tensor]) -> None:
        """These leave the rank."""
        for transfer, view in zip(transfers, views, strict=True):
            self._sent[transfer.peer].append(checksum(view, transfer.dtype))

    def copy(self, copies: Sequence[Copy], source: Mapping[str, Tensor]) -> None:
        """These are copied."""
        for copy in copies:
            dtype = min(copy.destination.dtype, copy.source.dtype, key=lambda dtype: dtype.itemsize)
            self._sent[self._rank].append(checksum(copy.source.view(source[copy.source.param]), dtype))
            self._await(copy.destination, self._rank, dtype)

    def receive(self, transfers: Sequence[Transfer]) -> None:
        """These have been written."""
        for transfer in transfers:
            self._await(transfer.piece, transfer.peer, transfer.dtype)

    def _await(self, piece: Piece, sender: int, dtype: torch.dtype) -> None:
        self._to_write[piece.param].append((sender, len(self._written[sender]), piece, dtype))
        self._written[sender].append((piece, None))

    def close(self, param: str, tensor: Tensor) -> None:
        """All of a local tensor is written."""
        for sender, position, piece, dtype in self._to_write.pop(param):
            self._written[sender][position] = piece, checksum(piece.view(tensor), dtype)

    def settle(self, group: dist.ProcessGroup | None) -> None:
        """Compare with the other ranks' checksums.

        Raises:
            SyncError: on all ranks, with what did not arrive on any of them.
        """
        assert not self._to_write, f"{min(self._to_write)} is not closed"
        found = {
            sender: torch.stack([value for _, value in boxes if value is not None])
            for sender, boxes in self._written.items()
        }
        sent = {reader: torch.stack(values) for reader, values in self._sent.items()}
        expected = {
            sender: sent[sender] if sender == self._rank else torch.empty_like(values)
            for sender, values in found.items()
        }
        messages = [
            dist.P2POp(operation, values, group=group, group_peer=peer)
            for operation, by_peer in ((dist.irecv, expected), (dist.isend, sent))
            for peer, values in sorted(by_peer.items())
            if peer != self._rank
        ]
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        self._raise(found, expected, group)

    def _raise(
        self, found: Mapping[int, Tensor], expected: Mapping[int, Tensor], group: dist.ProcessGroup | None
    ) -> None:
        wrong = [
            f"{piece.name} {piece.box} from rank {sender} to rank {self._rank}"
            for sender, values in sorted(found.items())
            for position in (values != expected[sender]).nonzero().flatten().tolist()
            for piece, _ in [self._written[sender][position]]
        ]
        faults: list[list[str]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(faults, wrong[:MOST_NAMED], group=group)
        if named := [fault for of_rank in faults for fault in of_rank]:
            raise SyncError(f"what arrived is not what was sent: {'; '.join(named[:MOST_NAMED])}")
