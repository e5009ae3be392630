"""Tensors of some ranks reach all of them, in few rounds."""

from math import ceil, log2
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megarl.distributed.all_gather import all_gather
from tests.support.ranks import RankPool

SIZES = [3, 0, 5, 1, 0, 2, 7]


def gather(ranks: list[int]) -> tuple[list[list[int]], int]:
    """Return what a rank of the list gets, and the messages that it sends."""
    rank = dist.get_rank()
    if rank not in ranks:
        return [], 0
    sent = []
    send = dist.isend

    def count(tensor: torch.Tensor, *args: Any, **settings: Any) -> Any:
        sent.append(tensor)
        return send(tensor, *args, **settings)

    with patch.object(dist, "isend", count):
        sizes = torch.tensor([SIZES[other] for other in ranks])
        found = all_gather(torch.arange(SIZES[rank]) + 10 * rank, ranks, sizes).split(sizes.tolist())
    return [each.tolist() for each in found], len(sent)


@pytest.mark.parametrize(
    "ranks", [[0], [1, 0], [0, 2, 4], [4, 1, 3, 0], [0, 1, 2, 3, 4], [6, 5, 4, 3, 2, 1, 0]], ids=str
)
def test_ranks_get_tensors_in_few_messages(pool: RankPool, ranks: list[int]) -> None:
    expected = [[10 * rank + place for place in range(SIZES[rank])] for rank in ranks]
    found = pool.run(max(ranks) + 1, gather, ranks)
    for rank in ranks:
        assert found[rank] == (expected, ceil(log2(len(ranks))))
