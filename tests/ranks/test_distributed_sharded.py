"""Numbers of all samples do not depend, to the last bit, on how the samples are spread."""

from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.config import AlgorithmSection, PolicyLossSection, RolloutCorrectionSection
from megarl.batch import Experience, Marked, Rewarded
from megarl.distributed.selection import kth_largest
from megarl.distributed.sharded import Sharded, Shares, shard
from megarl.rollout.config import SyncSection
from megarl.rollout.limits import Limits
from megarl.training.estimate import estimate, mismatch_metrics
from megarl.training.gate import Gate
from megarl.training.marks import mark
from megarl.training.statistics import mean, numbers_of, summaries
from tests.support.ranks import RankPool
from tests.support.records import answer, experience, on_all_ranks, prompts

pytestmark = pytest.mark.ranks

COLUMN = torch.randn(37, generator=torch.Generator().manual_seed(4))  # of the 37 tokens of `experience`
MARKS = [
    PolicyLossSection(loss_mode="kl_cov", kl_cov_ratio=0.2),
    PolicyLossSection(loss_mode="clip_cov", clip_cov_ratio=0.3, clip_cov_lb=0.1, clip_cov_ub=5.0),
]


def whole() -> Experience:
    """Return samples with some observed tokens, and with many equal covariances."""
    found = experience()
    mask = found.mask & (torch.arange(len(found.mask)) % 7 != 3)
    return replace(found, mask=mask, advantages=found.advantages.round())


def of(samples: Sharded[Experience]) -> list[Any]:
    """Return numbers of all samples. Ranks that do not report have other outputs, as before the last pipeline stage."""
    share, column = samples.share, samples.share_of(COLUMN)
    if not samples.shares.reports:
        column = torch.full_like(column, 1e3)
    marked = [mark(samples, section).share for section in MARKS]
    assert all(isinstance(each, Marked) for each in marked)
    return [
        summaries(samples, column, -column),
        mean(samples, column),
        kth_largest(column[share.mask].double(), 5, counts=samples.shares.reports),
        samples.gather(share.sums(column)).tolist(),
        samples.gather_tokens(column).tolist(),
        numbers_of(samples, share.mask)[1],
        samples.first(3, {place: int(share.num_tokens[place]) for place in range(len(share)) if place % 2}),
        on_all_ranks(samples).responses.tolist(),
        *(samples.gather_tokens(each.marked).tolist() for each in marked if isinstance(each, Marked)),
    ]


def spread_and_measure(owners: list[int], size: int) -> list[Any]:
    shares = Shares.blocks(size)
    return of(shard(whole(), torch.tensor(owners), shares))


def measure_alone() -> list[Any]:
    return of(shard(whole(), torch.zeros(8, dtype=torch.int64), Shares.everywhere()))


@pytest.mark.parametrize(
    ("owners", "size"),
    [([0, 1, 2, 3, 0, 1, 2, 3], 1), ([3, 3, 0, 0, 3, 0, 3, 3], 1), ([1, 0, 0, 1, 1, 1, 0, 0], 2)],
)
def test_spread_samples_give_equal_numbers(pool: RankPool, owners: list[int], size: int) -> None:
    """One number, `first`, is of the samples with odd places in their shares, and depends on these by definition."""
    [expected] = pool.run(1, measure_alone)
    for found in pool.run(4, spread_and_measure, owners, size):
        assert [*found[:6], *found[7:]] == [*expected[:6], *expected[7:]]
        assert list(found[6]) == sorted(found[6])
        assert len(found[6]) == 3


def first_of_none(owners: list[int]) -> dict[int, object]:
    samples = shard(whole(), torch.tensor(owners), Shares.blocks(1))
    with patch.object(dist, "all_gather_object", side_effect=AssertionError("objects are exchanged")):
        return samples.first(3, {})


def test_ranks_without_objects_exchange_none(pool: RankPool) -> None:
    assert pool.run(4, first_of_none, [0, 1, 2, 3, 0, 1, 2, 3]) == [{}] * 4


def brought(owners: list[int], size: int) -> tuple[list[int], list[int]] | None:
    """Return tokens and lengths of the prompts that the first rank gets."""
    found = shard(whole(), torch.tensor(owners), Shares.blocks(size)).to_first_rank()
    return None if found is None else (found.responses.tolist(), found.prompt_lengths().tolist())


@pytest.mark.parametrize(("owners", "size"), [([3, 3, 0, 0, 3, 0, 3, 3], 1), ([1, 0, 0, 1, 1, 1, 0, 0], 2)])
def test_first_rank_alone_gets_all_samples(pool: RankPool, owners: list[int], size: int) -> None:
    record = whole()
    expected = (record.responses.tolist(), record.prompt_lengths().tolist())
    assert pool.run(4, brought, owners, size) == [expected, None, None, None]


def numbered(owners: list[int]) -> tuple[list[int], list[int]]:
    """Return the places of this rank's marked tokens among all tokens, and their numbers."""
    record = whole()
    samples = shard(record, torch.tensor(owners), Shares.blocks(1))
    numbers, _ = numbers_of(samples, samples.share.mask)
    places = samples.share_of(torch.arange(len(record.mask)))
    return places[samples.share.mask].tolist(), numbers[samples.share.mask].tolist()


def test_marked_tokens_are_numbered_in_order(pool: RankPool) -> None:
    found = pool.run(4, numbered, [2, 0, 3, 1, 0, 2, 1, 3])
    by_place = {place: number for places, numbers in found for place, number in zip(places, numbers, strict=True)}
    assert [by_place[place] for place in sorted(by_place)] == list(range(len(by_place)))
    assert sorted(by_place) == whole().mask.nonzero()[:, 0].tolist()


def largest(numbers: list[Tensor]) -> list[float]:
    return [kth_largest(numbers[dist.get_rank()], k, counts=True) for k in range(1, sum(map(len, numbers)) + 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_rank_finds_the_kth_largest(pool: RankPool, dtype: torch.dtype) -> None:
    """Signs, zeros, infinities, equal numbers and ranks without a number."""
    limits = torch.finfo(dtype)
    tiny = limits.smallest_normal / 2
    of_ranks = [[3.0, limits.min, 0.0, tiny], [], [3.0, float("inf"), -2.5, float("-inf")], [-tiny, 1.0, 3.0]]
    numbers = [torch.tensor(of_rank, dtype=dtype) for of_rank in of_ranks]
    assert pool.run(4, largest, numbers) == [sorted(torch.cat(numbers).tolist(), reverse=True)] * 4


def estimated(samples: Sharded[Any], estimator: str) -> list[Any]:
    """Return what a step computes of scored samples between two models."""
    share = samples.share
    old = share.rollout_log_probs + 1e-7
    level: Literal["token", "sequence"] = "token" if estimator == "gae" else "sequence"
    corrected = RolloutCorrectionSection(rollout_is=level, rollout_is_batch_normalize=True)
    passed = Gate(limits=Limits.of(SyncSection(), "float32")).check(samples, old, (), step=0)
    found, metrics = estimate(
        samples,
        old_log_probs=old,
        ref_log_probs=old - 0.25,
        values=share.rollout_log_probs / 2 if estimator == "gae" else None,
        algorithm=AlgorithmSection(adv_estimator=estimator, rollout_correction=corrected),
        kl_coef=0.1,
    )
    of_tokens = (found.share.advantages, found.share.returns, found.share.weights)
    columns = [found.gather_tokens(each).tolist() for each in of_tokens]
    return [passed.rows is None, passed.metrics, mismatch_metrics(samples, old), metrics, columns]


def scored() -> Rewarded:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    drawn = answer(prompts([2, 4]), lengths)
    return drawn.extend(Rewarded, scores=torch.tensor([0.0, 1.0, 1.0, 0.5, 0.0, 2.0, 1.0, 1.0]))


def spread_and_estimate(owners: list[int], estimator: str) -> list[Any]:
    return estimated(shard(scored(), torch.tensor(owners), Shares.blocks(1)), estimator)


def estimate_alone(estimator: str) -> list[Any]:
    return estimated(shard(scored(), torch.zeros(8, dtype=torch.int64), Shares.everywhere()), estimator)


@pytest.mark.parametrize("estimator", ["gae", "gpg", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_estimates_do_not_depend_on_the_spread(pool: RankPool, estimator: str) -> None:
    """Also if a rank has no sample, and if the samples of a prompt are on one rank."""
    [expected] = pool.run(1, estimate_alone, estimator)
    for owners in ([0, 1, 2, 3, 0, 1, 2, 3], [3, 3, 0, 0, 3, 0, 3, 3], [2, 2, 2, 2, 1, 1, 1, 1]):
        assert pool.run(4, spread_and_estimate, owners, estimator) == [expected] * 4
