"""Copies of a learner's state in host memory: a checkpoint is written from the copies while the learner continues.

A rank copies only state that it holds and writes: its own shard of a distributed optimizer, and its part of the weights
that all data-parallel ranks hold. Later, parameters at the borders of shards are put together, through separate process
groups, so that messages of other threads cannot interfere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megarl.distributed.exchange import world_timeout
from megarl.distributed.pieces import Pieces
from megarl.platform.device import on_cuda

OPTIMIZED = ("param", "exp_avg", "exp_avg_sq")


class Staging:
    """Host memory and process groups that a run keeps for its saves; pinned memory speeds up copies from a device."""

    def __init__(self, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned and on_cuda()
        self._tensors: dict[str, Tensor] = {}
        self._places: set[int] = set()  # addresses of the tensors' storages
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._writers: dict[str, ShardDistribution | None] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for a copy: the same memory for the same name, until `release`."""
        if name not in self._tensors:
            self._tensors[name] = torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned)
            self._places.add(self._tensors[name].untyped_storage().data_ptr())
        return self._tensors[name]

    def has(self, tensor: Tensor) -> bool:
        """Return whether the tensor lies in memory of this object."""
        return tensor.untyped_storage().data_ptr() in self._places

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return a gloo group of `ranks` that nothing else uses. Collective over `ranks`."""
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(
                list(ranks), timeout=world_timeout(), backend="gloo", use_local_synchronization=True
            )
        return self._groups[ranks]

    def knows(self, name: str) -> bool:
        """Return whether `choose_writers` has been called for the state of this name."""
        return name in self._writers

    def choose_writers(self, name: str, state: ShardedStateDict) -> None:
        """Choose the data-parallel rank that writes each shard, so that all write about as much (D415). Collective.

        Ranks exchange messages for the first state of a name. Later states must have the same shards.
        """
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if not self.knows(name):
            self._writers[name] = determine_main_replica_uniform_distribution(state, group)
        distribute_main_replicas_with_precomputed_distribution(state, group, self._writers[name])

    @property
    def num_bytes(self) -> int:
        """The size of all memory of this object."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def release(self) -> None:
        """Free all memory."""
        self._tensors.clear()
        self._places.clear()


def copy_shards(state: ShardedStateDict, staging: Staging, name: str) -> None:
    """Replace the live tensors that this rank writes by copies, which are complete when the device is idle.

    Collective.
    """
    apply_factories(state)
    staging.choose_writers(name, state)
    for number, shard in enumerate(nested_values(state)):
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id) and not staging.has(shard.data):
            copy = staging.take(f"{name}.{number}", tuple(shard.data.shape), shard.data.dtype)
            shard.data = copy.copy_(shard.data.detach(), non_blocking=True)


def room_for_optimizer(part: DistributedOptimizer) -> dict[object, object]:
    """Return room for the whole state of a distributed optimizer, on every rank.

    Megatron makes no room for the padding between buckets, in whose place there are parameters.
    """
    state: dict[object, object] = {"buckets_coalesced": True}
    for number, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        [dtype] = ranges
        room = {key: torch.empty(buffer.numel, dtype=torch.float32) for key in OPTIMIZED}
        state[number] = {dtype: {"numel_unpadded": buffer.numel} | room}
    return state


Message = tuple[Callable[..., dist.Work | None], Tensor, int]
"""`dist.isend` or `dist.irecv`, the memory, and the other rank of the group."""


@dataclass(frozen=True, kw_only=True)
class OptimizerCopy:
    """The part of a distributed optimizer that a rank copied: the state of the parameters that it writes."""

    state: dict[object, object]  # as `get_parameter_state_dp_zero` returns it
    written: frozenset[int]  # the numbers of these parameters
    messages: Sequence[Message]  # between this rank and other data-parallel ranks, which complete the state
    group: dist.ProcessGroup | None  # of these ranks

    def gather(self) -> None:
        """Complete the state. All data-parallel ranks call this, from any thread."""
        operations = [
            dist.P2POp(operation, data, group=self.group, group_peer=peer) for operation, data, peer in self.messages
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()


@dataclass(frozen=True)
class _Values:
    """A number for each element of some parameters, which Megatron takes by the places of parameters in a buffer."""

    memory: Tensor
    places: Mapping[int, slice]  # begin of a parameter in the buffer -> its place in the memory

    def __getitem__(self, place: slice) -> Tensor:
        if place.start not in self.places:  # another rank writes this parameter
            return torch.zeros(1).expand(place.stop - place.start)
        return self.memory[self.places[place.start]]


def copy_optimizer(part: DistributedOptimizer, staging: Staging, name: str) -> OptimizerCopy:
    """Copy this rank's shard of a distributed optimizer's state.

    The rank that holds most of a parameter writes it, so only parameters at the borders of shards travel.
    """
    members = tuple(dist.get_process_group_ranks(part.data_parallel_group))
    rank = part.data_parallel_group.rank()
    group = staging.group(members) if len(members) > 1 else None
    state: dict[object, object] = {"buckets_coalesced": True}
    num_parameters = 0
    written = set[int]()  # the numbers of parameters
    messages = list[Message]()
    for number, (buffer, by_dtype) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        [dtype] = by_dtype
        pieces = [_pieces(place, buffer.buckets, len(members)) for place in buffer.param_index_map.values()]
        numel = sum(each.copied_by(rank) for each in pieces)
        memory = {key: staging.take(f"{name}.{number}.{key}", (numel,), torch.float32) for key in OPTIMIZED}
        places: dict[int, slice] = {}
        end = 0
        for each, (param, (start, *_)) in zip(pieces, buffer.param_index_map.items(), strict=True):
            place = slice(end, end + each.copied_by(rank))
            end = place.stop
            if each.owner == rank:
                written.add(num_parameters)
                places[start] = place
            num_parameters += 1
            if rank in each.on_ranks:
                values = part._get_main_param_and_optimizer_states(param)
                for key in OPTIMIZED:
                    copy = memory[key][place]
                    copy[each.place_in_copy(rank)].copy_(values[key].detach(), non_blocking=True)
                    messages += _messages(copy, each, rank)
        values_of = {key: _Values(memory[key], places) for key in OPTIMIZED}
        state[number] = {dtype: {"numel_unpadded": buffer.numel} | values_of}
    return OptimizerCopy(state=state, written=frozenset(written), messages=messages, group=group)


def _messages(copy: Tensor, pieces: Pieces, rank: int) -> list[Message]:
    """Return the messages that complete a parameter on its owner. `copy` is what this rank has of it."""
    if rank != pieces.owner:
        return [(dist.isend, copy, pieces.owner)]
    others = ((other, piece) for other, piece in pieces.on_ranks.items() if other != rank)
    return [(dist.irecv, copy[piece.start : piece.stop], other) for other, piece in others]


def _pieces(place: tuple[int, int, int], buckets: Sequence[_ParamAndGradBucket], size: int) -> Pieces:
    """Cut a parameter into the pieces of data-parallel ranks. The buffer knows its begin, its end and its bucket."""
    start, end, number = place
    bucket = buckets[number]
    return Pieces.cut(start - bucket.offset, end - bucket.offset, shard=bucket.grad_data.numel() // size)


def keep_written(optimizer: dict[str, dict[int, dict[str, ShardedTensor]]], copy: OptimizerCopy) -> None:
    """Leave in the shards of a distributed optimizer the parameters that this rank writes, as their main replica."""
    optimizer["param_state"] = {
        number: {key: replace(shard, replica_id=(*shard.replica_id[:-1], 0)) for key, shard in shards.items()}
        for number, shards in optimizer["param_state"].items()
        if number in copy.written
    }
