"""Copies of a learner's state in host memory: what a checkpoint is written from while the learner goes on.

A rank copies only what it has and what is written: of weights the replica that is, of a distributed optimizer its own
shard. The shards come together on the first data-parallel rank later, through groups of their own, so that no other
thread's collectives meet them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from torch import Tensor

OPTIMIZED = ("param", "exp_avg", "exp_avg_sq")


class Staging:
    """Host memory, and groups of ranks, that a run keeps for its saves; `is_pinned` where a device copies faster so."""

    def __init__(self, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned and torch.cuda.is_available()
        self._tensors: dict[str, Tensor] = {}
        self._places: set[int] = set()  # where they lie
        self._groups: dict[tuple[int, ...], Any] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a copy, the same for the same name until it is released."""
        if name not in self._tensors:
            self._tensors[name] = torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned)
            self._places.add(self._tensors[name].untyped_storage().data_ptr())
        return self._tensors[name]

    def has(self, tensor: Tensor) -> bool:
        """Is this memory of ours?"""
        return tensor.untyped_storage().data_ptr() in self._places

    def group(self, ranks: tuple[int, ...]) -> Any:
        """A gloo group of `ranks` that nothing else uses. Collective over them."""
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        return self._groups[ranks]

    @property
    def num_bytes(self) -> int:
        """Of all memory that is kept."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def release(self) -> None:
        """Keep no memory."""
        self._tensors.clear()
        self._places.clear()


def copy_shards(state: dict[str, Any], staging: Staging, name: str) -> None:
    """Replace what of the live tensors would be written by copies, which are there when the device is idle."""
    apply_factories(state)
    for number, shard in enumerate(nested_values(state)):
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id) and not staging.has(shard.data):
            copy = staging.take(f"{name}.{number}", tuple(shard.data.shape), shard.data.dtype)
            shard.data = copy.copy_(shard.data.detach(), non_blocking=True)


def copy_optimizer(part: Any, staging: Staging, name: str) -> tuple[dict[Any, Any] | None, Callable[[], None]]:
    """Copy this rank's shard of a distributed optimizer's state.

    Returns what `get_parameter_state_dp_zero` answers on the first data-parallel rank, None on others; its tensors are
    complete when the returned function has been called on all of them, in whatever thread.
    """
    size, rank = part.data_parallel_group.size(), part.data_parallel_group.rank()
    group = staging.group(tuple(dist.get_process_group_ranks(part.data_parallel_group))) if size > 1 else None
    state: dict[Any, Any] = {"buckets_coalesced": True}
    shards: list[tuple[Tensor, int, int]] = []  # of one bucket each: memory, where the bucket begins, length of a shard
    for number, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        [(dtype, places)] = ranges.items()
        state[number] = {dtype: {"numel_unpadded": buffer.numel}}
        for key in OPTIMIZED:
            kept = staging.take(f"{name}.{number}.{key}", (buffer.numel // (size if rank else 1),), torch.float32)
            state[number][dtype][key] = kept  # with all padding, so that parameters are where the buffer has them
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
