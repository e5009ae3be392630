"""Records spread over the ranks of a test."""

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megarl.batch import Rollouts
from megarl.distributed.sharded import Sharded, Shares, shard

R = TypeVar("R", bound=Rollouts)


def spread(record: R, owners: Sequence[int] | None = None) -> Sharded[R]:
    """Give each sample to the rank that owns it; without `owners`, every sample to every rank. Collective."""
    if owners is None:
        return shard(record, torch.zeros(len(record), dtype=torch.int64), Shares.everywhere())
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return shard(record, torch.tensor(owners), Shares.blocks(1, group=groups[dist.get_rank()]))
