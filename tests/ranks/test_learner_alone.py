"""A single data-parallel rank keeps its gradients and weights in place, and gloo starts no OpenMP threads for it."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks

SIZE = 1 << 20  # torch copies so many numbers with several threads


def threads() -> set[str]:
    return {thread.name for thread in Path("/proc/self/task").iterdir()}


def exchange_buckets() -> tuple[list[float], list[float], int]:
    """Return the means of a summed shard and of a gathered bucket, and how many threads they started."""
    from megatron.core.distributed import param_and_grad_buffer

    from megarl.distributed.exchange import together
    from megarl.learner.patches import apply_patches

    apply_patches()
    torch.set_num_threads(2)
    torch.ones(SIZE).exp()  # the threads of this thread
    before = threads()
    rank, size = dist.get_rank(), dist.get_world_size()
    gradients, weights = torch.full((SIZE,), 1.0 + rank), torch.full((SIZE,), 1.0 + rank)
    shards = [bucket.chunk(size)[rank] for bucket in (gradients, weights)]
    world = dist.group.WORLD
    param_and_grad_buffer.dist_reduce_scatter_func(
        shards[0], gradients, op=dist.ReduceOp.SUM, group=world, async_op=False
    )
    param_and_grad_buffer.dist_all_gather_func(weights, shards[1], group=world, async_op=False)
    together(lambda: bytes(SIZE))
    started = len(threads() - before)
    torch.set_num_threads(1)
    return shards[0].unique().tolist(), weights.unique().tolist(), started


def test_single_rank_keeps_its_buckets_without_thread(pool: RankPool) -> None:
    assert pool.run(1, exchange_buckets) == [([1.0], [1.0], 0)]


def test_two_ranks_still_sum_and_gather(pool: RankPool) -> None:
    sums, weights, _ = zip(*pool.run(2, exchange_buckets), strict=True)
    assert sums == ([3.0], [3.0])
    assert weights == ([1.0, 2.0], [1.0, 2.0])
