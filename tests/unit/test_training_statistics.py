"""Statistics of the tokens of a step, against those of all tokens in one tensor."""

from dataclasses import replace

import pytest
import torch

from megarl.algorithms.masked import masked_moments
from megarl.training.statistics import Summary, summaries
from tests.support.records import alone, experience


def test_summary_equals_that_of_one_tensor() -> None:
    record = experience()
    mask = torch.arange(len(record.mask)) % 7 != 3
    column = 1e6 + torch.randn(len(mask), generator=torch.Generator().manual_seed(1))
    column[~mask] = float("nan")
    [found] = summaries(alone(replace(record, mask=mask)), column)
    mean, variance = masked_moments(column[None], mask[None])
    assert found.mean == pytest.approx(float(mean), rel=1e-14)
    assert found.variance == pytest.approx(float(variance), rel=1e-9)
    assert (found.largest, found.smallest) == (float(column[mask].max()), float(column[mask].min()))


def test_summary_of_no_token_is_zero() -> None:
    record = experience()
    nothing = alone(replace(record, mask=torch.zeros_like(record.mask)))
    assert summaries(nothing, torch.ones(len(record.mask))) == [Summary(0.0, 0.0, 0.0, 0.0)]
