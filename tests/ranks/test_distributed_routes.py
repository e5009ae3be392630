"""Routes reach the ranks that replay them: of their layers alone, in the order of the samples, and each once."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Rewarded
from megarl.distributed.routes import Holders, redistribute_routes
from megarl.distributed.runs import Runs
from megarl.distributed.sharded import Shares, shard
from tests.support.ranks import RankPool
from tests.support.records import answer, prompts

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]  # of the responses: four to each of three prompts
PLAIN = answer(prompts([2, 4, 3]), LENGTHS).extend(Rewarded, scores=torch.zeros(len(LENGTHS)))
PLACES = PLAIN.num_places()
NUM_LAYERS, TOP_K = 3, 2
SOURCES = {"each": ((0,), (1,), (2,), (3,)), "pairs": ((0, 1), (2, 3)), "all": ((0, 1, 2, 3),)}
MESHES: dict[str, list[tuple[int, tuple[int, ...]]]] = {  # of each rank: its new share, and its layers
    "data": [(0, (0, 1, 2)), (1, (0, 1, 2)), (2, (0, 1, 2)), (3, (0, 1, 2))],
    "pipeline": [(0, (0,)), (0, (1, 2)), (1, (0,)), (1, (1, 2))],
    "interleaved": [(0, (0, 2)), (0, (0, 2)), (0, (1,)), (0, (1,))],
    "first dense": [(0, ()), (0, ()), (0, (0, 1, 2)), (0, (0, 1, 2))],
}


def routes(dtype: torch.dtype) -> Tensor:
    """Return routes that are all different, as far as the type allows."""
    numbers = torch.arange(int(PLACES.sum()) * NUM_LAYERS * TOP_K) % 251
    return numbers.view(-1, NUM_LAYERS, TOP_K).to(dtype)


def brought(dtype: torch.dtype, source: str, mesh: str, owners: Tensor, there: Tensor) -> tuple[bool, int]:
    """Return whether this rank has the right routes, and the bytes that it received."""
    record = replace(PLAIN, routes=routes(dtype))
    ranks = SOURCES[source]
    rank = dist.get_rank()
    old = Shares.blocks(len(ranks[0]))
    share, layers = MESHES[mesh][rank]
    reports = [each[0] for each in MESHES[mesh]].index(share) == rank
    new = Shares.of(share, reports=reports)
    num_bytes = 0

    def counted(receive: Any) -> Any:
        def call(content: Tensor, source: int, **options: Any) -> Any:
            nonlocal num_bytes
            num_bytes += content.nbytes
            return receive(content, source, **options)

        return call

    holders = Holders.of(new, layers)
    with patch.multiple(dist, irecv=counted(dist.irecv), recv=counted(dist.recv)):
        found = redistribute_routes(shard(record, owners, old), Runs.of(record.groups, there), holders)
    expected = shard(record, there, new).share.routes
    assert expected is not None
    return torch.equal(found, expected[:, list(layers)]) and found.dtype == dtype, num_bytes


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("source", SOURCES)
def test_a_rank_gets_routes_of_its_layers_once(pool: RankPool, source: str, mesh: str, dtype: torch.dtype) -> None:
    ranks = SOURCES[source]
    num_shares = len({share for share, _ in MESHES[mesh]})
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        owners = torch.randint(len(ranks), (len(LENGTHS),), generator=generator)
        there = torch.randint(num_shares, (len(LENGTHS),), generator=generator)
        found = pool.run(4, brought, dtype, source, mesh, owners, there)
        assert [is_right for is_right, _ in found] == [True] * 4
        for rank, (_, num_bytes) in enumerate(found):
            share, layers = MESHES[mesh][rank]
            is_first = MESHES[mesh].index((share, layers)) == rank
            has = torch.tensor([is_first and rank in of_source for of_source in ranks])[owners]
            missing = PLACES[(there == share) & ~has].sum() * (source != "all")
            assert num_bytes == missing * len(layers) * TOP_K * dtype.itemsize
