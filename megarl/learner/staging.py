"""Copies of a learner's state in host memory: a checkpoint is written from the copies while the learner continues.

A rank copies only state that it holds and that is written: the weights of the main replica, and its own shard of a
distributed optimizer. Later, the first data-parallel rank gathers the shards, through separate process groups, so that
collectives of other threads cannot interfere.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from torch import Tensor

from megarl.platform.device import on_cuda

OPTIMIZED = ("param", "exp_avg", "exp_avg_sq")


class Staging:
    """Host memory and process groups that a run keeps for its saves; pinned memory speeds up copies from a device."""

    def __init__(self, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned and on_cuda()
        self._tensors: dict[str, Tensor] = {}
        self._places: set[int] = set()  # addresses of the tensors' storages
        self._groups: dict[tuple[int, ...], Any] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for a copy: the same memory for the same name, until `release`."""
        if name not in self._tensors:
            self._tensors[name] = torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned)
            self._places.add(self._tensors[name].untyped_storage().data_ptr())
        return self._tensors[name]

    def has(self, tensor: Tensor) -> bool:
        """Return whether the tensor lies in memory of this object."""
        return tensor.untyped_storage().data_ptr() in self._places

    def group(self, ranks: tuple[int, ...]) -> Any:
        """Return a gloo group of `ranks` that nothing else uses. Collective over `ranks`."""
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        return self._groups[ranks]

    @property
    def num_bytes(self) -> int:
        """The size of all memory of this object."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def release(self) -> None:
        """Free all memory."""
        self._tensors.clear()
        self._places.clear()


def copy_shards(state: dict[str, Any], staging: Staging, name: str) -> None:
    """Replace the live tensors that this rank writes by copies, which are complete when the device is idle."""
    apply_factories(state)
    for number, shard in enumerate(nested_values(state)):
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id) and not staging.has(shard.data):
            copy = staging.take(f"{name}.{number}", tuple(shard.data.shape), shard.data.dtype)
            shard.data = copy.copy_(shard.data.detach(), non_blocking=True)


def room_for_optimizer(part: Any) -> dict[Any, Any]:
    """Return the state of a distributed optimizer as `copy_optimizer` does, on every rank and without values.

    Megatron makes no room for the padding between buckets, in whose place there are parameters.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for number, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        [dtype] = ranges
        room = {key: torch.empty(buffer.numel, dtype=torch.float32) for key in OPTIMIZED}
        state[number] = {dtype: {"numel_unpadded": buffer.numel} | room}
    return state


def copy_optimizer(part: Any, staging: Staging, name: str) -> tuple[dict[Any, Any] | None, Callable[[], None]]:
    """Copy this rank's shard of a distributed optimizer's state.

    Returns the result of `get_parameter_state_dp_zero`, which is None except on the first data-parallel rank, and a
    function. The tensors are complete when all data-parallel ranks have called the function, from any thread.
    """
    size = part.data_parallel_group.size()
    rank = part.data_parallel_group.rank()
    group = staging.group(tuple(dist.get_process_group_ranks(part.data_parallel_group))) if size > 1 else None
    state: dict[Any, Any] = {"buckets_coalesced": True}
    shards: list[tuple[Tensor, int, int]] = []  # for each bucket: memory, offset, length of a shard
    for number, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        [(dtype, places)] = ranges.items()
        state[number] = {dtype: {"numel_unpadded": buffer.numel}}
        for key in OPTIMIZED:
            kept = staging.take(f"{name}.{number}.{key}", (buffer.numel // (size if rank else 1),), torch.float32)
            state[number][dtype][key] = kept  # with all padding, to keep the buffer's offsets
            for bucket, place in zip(buffer.buckets, places, strict=True):
                start = bucket.offset // (size if rank else 1)
                for param, where in place["param_map"].items():
                    mine = part._get_main_param_and_optimizer_states(param)[key].detach()
                    local = where["gbuf_local"]
                    kept[start + local.start : start + local.end].copy_(mine, non_blocking=True)
                shards.append((kept, bucket.offset, bucket.grad_data.numel() // size))

    def gather() -> None:
        for kept, start, numel in shards if group else []:
            if rank:
                dist.send(kept[start // size : start // size + numel], group=group, group_dst=0)
                continue
            for other in range(1, size):
                dist.recv(kept[start + other * numel : start + (other + 1) * numel], group=group, group_src=other)

    return None if rank else state, gather
