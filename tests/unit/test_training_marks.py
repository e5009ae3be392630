"""The tokens that `kl_cov` and `clip_cov` choose, against a search through all tokens."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.config import PolicyLossSection
from megarl.algorithms.covariance import token_covariances
from megarl.batch import Experience, Marked
from megarl.training.marks import mark
from tests.support.records import alone, experience

EQUAL = torch.zeros(37)  # a covariance of zero for each token of `experience`


def marked(record: Experience, section: PolicyLossSection) -> Tensor:
    found = mark(alone(record), section).share
    assert isinstance(found, Marked)
    return found.marked


def random(seed: int) -> tuple[Experience, Tensor]:
    """Return samples with some tokens of an environment, and the covariance of each token."""
    generator = torch.Generator().manual_seed(seed)
    record = experience()
    old, advantages = (torch.randn(len(record.mask), generator=generator) for _ in range(2))
    mask = torch.rand(len(record.mask), generator=generator) < 0.7
    mask[0] = True
    record = replace(record, old_log_probs=old, advantages=advantages, mask=mask)
    means = {name: float(x[mask].double().mean()) for name, x in (("log_prob", old), ("advantage", advantages))}
    found = token_covariances(old, advantages, mask, mean_log_prob=means["log_prob"], mean_advantage=means["advantage"])
    return record, found


def most(mask: Tensor, ratio: float) -> int:
    return max(int(ratio * int(mask.sum())), 1)


@given(seed=st.integers(0, 2**31), ratio=st.floats(0.0, 1.0))
def test_kl_cov_takes_the_largest(seed: int, ratio: float) -> None:
    record, covariances = random(seed)
    chosen = marked(record, PolicyLossSection(loss_mode="kl_cov", kl_cov_ratio=ratio))
    assert int(chosen.sum()) == most(record.mask, ratio)
    assert not (chosen & ~record.mask).any()
    rest = record.mask & ~chosen
    assert not rest.any() or covariances[chosen].min() >= covariances[rest].max()


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_equal_covariances_are_taken_in_order(ratio: float) -> None:
    record = replace(experience(), advantages=EQUAL)
    chosen = marked(record, PolicyLossSection(loss_mode="kl_cov", kl_cov_ratio=ratio))
    assert chosen.tolist() == [place < most(record.mask, ratio) for place in range(37)]


@given(seed=st.integers(0, 2**31), ratio=st.floats(0.0, 1.0), lower=st.floats(-1.0, 0.5), width=st.floats(0.0, 2.0))
def test_clip_cov_selects_tokens_within_band(seed: int, ratio: float, lower: float, width: float) -> None:
    record, covariances = random(seed)
    section = PolicyLossSection(
        loss_mode="clip_cov", clip_cov_ratio=ratio, clip_cov_lb=lower, clip_cov_ub=lower + width
    )
    chosen = marked(record, section)
    band = record.mask & (covariances > lower) & (covariances < lower + width)
    assert not (chosen & ~band).any()
    assert int(chosen.sum()) == min(most(record.mask, ratio), int(band.sum()))
    assert torch.equal(marked(record, section), chosen)


def test_clip_cov_selects_tokens_uniformly() -> None:
    """Over many mini-batches, the first half of the tokens has half of the marks, within six deviations."""
    section = PolicyLossSection(loss_mode="clip_cov", clip_cov_ratio=0.25, clip_cov_lb=-9.0, clip_cov_ub=9.0)
    records = [random(seed)[0] for seed in range(200)]
    first = sum(int(marked(record, section)[:18].sum()) / int(record.mask[:18].sum()) for record in records)
    second = sum(int(marked(record, section)[18:].sum()) / int(record.mask[18:].sum()) for record in records)
    assert 0.8 < first / second < 1.25


def test_other_losses_leave_the_mini_batch() -> None:
    whole = alone(experience())
    assert mark(whole, PolicyLossSection()) is whole
