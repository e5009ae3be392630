"""Samples reach the ranks that learn from them, in worlds too large to start: one rank of a simulated world."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.samples_simulated import simulated
from megarl.batch import Rollouts
from megarl.distributed.redistribution import redistribute
from megarl.distributed.runs import Runs
from megarl.distributed.sharded import Shares, shard
from tests.support.records import answer, prompts

NUM_SAMPLES, NUM_TOKENS, RANK = 6, 5, 3


class Operations(TorchDispatchMode):
    """Counts the operations of torch within a block."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.number += 1
        return func(*args, **kwargs or {})


def routed(num_ranks: int) -> tuple[int, Counter[str]]:
    """Route samples of three ranks to two ranks; return the operations and the traffic of one of all of these."""
    record = answer(prompts([2]), [NUM_TOKENS] * NUM_SAMPLES)
    owners = torch.tensor([0, RANK, RANK, RANK, num_ranks - 1, num_ranks - 1])
    new = torch.tensor([RANK, RANK, 0, num_ranks - 1, RANK, 0])
    with simulated(RANK, num_ranks) as transport:
        shares = Shares.blocks(1)
        samples = shard(record, owners, shares)
        with Operations() as operations:
            found = redistribute(samples, Rollouts, Runs.of(record.groups, new), shares)
        assert found.mine.tolist() == [0, 1, 4]
        assert found.share.response_ids(1).tolist() == record.response_ids(1).tolist()
        return operations.number, transport.counts


def test_operations_do_not_grow_with_ranks() -> None:
    few, of_few = routed(8)
    many, of_many = routed(4096)
    assert few == many
    of_sample = NUM_TOKENS * 13 + 1  # token, log-probability, version and mask of each token, and a flag
    assert of_few == of_many == {"messages": 4, "bytes_sent": 2 * of_sample, "bytes_received": 2 * of_sample}
