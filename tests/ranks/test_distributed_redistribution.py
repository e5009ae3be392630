"""Samples reach the ranks that learn from them: whole, in their order, and each token once."""

from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Rewarded, Scored
from megarl.distributed.redistribution import redistribute
from megarl.distributed.runs import Runs
from megarl.distributed.sharded import Shares, shard
from tests.support.ranks import RankPool
from tests.support.records import answer, prompts

pytestmark = pytest.mark.ranks

RANKS = {
    "each": ((0,), (1,), (2,), (3,)),
    "pairs": ((0, 1), (2, 3)),
    "all": ((0, 1, 2, 3),),
    "interleaved": ((2, 0), (3, 1)),
}
LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]  # of the responses: four to each of three prompts
NUM_SAMPLES = len(LENGTHS)
REWARDED = answer(prompts([2, 4, 3]), LENGTHS).extend(Rewarded, scores=torch.arange(NUM_SAMPLES) / 2)
RECORDS = {  # with the bytes of a token, and of a sample
    "rewarded": (REWARDED, 13, 5),
    "without log-probabilities": (replace(REWARDED, rollout_log_probs=None), 9, 5),
    "episodes": (
        replace(REWARDED, turn_rewards=torch.arange(sum(LENGTHS)) / 4, num_turns=torch.arange(NUM_SAMPLES)),
        17,
        13,
    ),
}
Message = tuple[int, int, int]  # sender, receiver, bytes


def shares_of(name: str) -> Shares:
    if name == "interleaved":
        return Shares.of(dist.get_rank() % 2, reports=dist.get_rank() >= 2)
    return Shares.everywhere() if name == "all" else Shares.blocks(len(RANKS[name][0]))


def owners_of(name: str, *, seed: int, num_used: int = 4) -> Tensor:
    """Return a share for each sample, one of the first `num_used`."""
    number = min(num_used, len(RANKS[name]))
    return torch.randint(number, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(seed))


def routed(record: Rewarded, source: str, destination: str, owners: Tensor, there: Tensor) -> tuple[Any, Any]:
    """Return the messages that this rank sends, and those that it receives. Check the samples that it has then.

    The texts of the samples stay behind.
    """
    old, new = shares_of(source), shares_of(destination)
    assert (old.ranks, new.ranks) == (RANKS[source], RANKS[destination])
    scored = record.extend(Scored, texts=[str(length) for length in LENGTHS], accuracies=record.scores)
    sent, received, here = list[Message](), list[Message](), dist.get_rank()
    isend, irecv = dist.isend, dist.irecv

    def noted_isend(content: Tensor, target: int, **options: Any) -> Any:
        sent.append((here, target, content.nbytes))
        return isend(content, target, **options)

    def noted_irecv(content: Tensor, first: int, **options: Any) -> Any:
        received.append((first, here, content.nbytes))
        return irecv(content, first, **options)

    with patch.multiple(dist, isend=noted_isend, irecv=noted_irecv):
        found = redistribute(shard(scored, owners, old), Rewarded, Runs.of(record.groups, there), new)
    expected = shard(record, there, new)
    assert found.shares == new
    assert_equal(found.index, expected.index)
    assert_equal(found.share, expected.share)
    return sent, received


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    for field in fields(expected):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, Runs):
            assert_equal(ours, theirs)
        elif isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, msg=field.name)
        else:
            assert ours == theirs, field.name


@pytest.mark.parametrize("destination", RANKS)
@pytest.mark.parametrize("source", RANKS)
@pytest.mark.parametrize("name", RECORDS)
def test_samples_cross_once_without_padding(pool: RankPool, name: str, source: str, destination: str) -> None:
    """Also if shares get no sample. A rank that does not receive for its share gets the share from others of it."""
    record, of_token, of_sample = RECORDS[name]
    sizes = of_token * record.num_tokens + of_sample
    for seed, (num_old, num_new) in enumerate([(4, 4), (4, 1), (1, 4)]):
        owners = owners_of(source, seed=seed, num_used=num_old)
        there = owners_of(destination, seed=100 + seed, num_used=num_new)
        told = pool.run(4, routed, record, source, destination, owners, there)
        messages = sorted(message for sent, _ in told for message in sent)
        assert messages == sorted(message for _, received in told for message in received)
        num_bytes = [sum(size for _, target, size in messages if target == rank) for rank in range(4)]
        for share, (first, *others) in enumerate(RANKS[destination]):
            has = torch.tensor([first in ranks for ranks in RANKS[source]])[owners]
            assert num_bytes[first] == sizes[(there == share) & ~has].sum()
            of_share = 0 if source == "all" else sizes[there == share].sum()
            assert [num_bytes[rank] for rank in others] == [of_share] * len(others)


@pytest.mark.parametrize("destination", RANKS)
def test_ranks_with_everything_exchange_nothing(pool: RankPool, destination: str) -> None:
    there = owners_of(destination, seed=3)
    nothing = torch.zeros(NUM_SAMPLES, dtype=torch.int64)
    assert pool.run(4, routed, REWARDED, "all", destination, nothing, there) == [([], [])] * 4


def test_samples_that_stay_are_not_sent(pool: RankPool) -> None:
    owners = owners_of("each", seed=4)
    assert pool.run(4, routed, REWARDED, "each", "each", owners, owners) == [([], [])] * 4
