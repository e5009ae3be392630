import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.covariance import clip_cov_tokens, kl_cov_tokens, token_covariances

NAN = float("nan")
MASK = torch.tensor([[True, True, False], [True, True, True]])
LOG_PROBS = torch.tensor([[-1.0, -3.0, NAN], [-2.0, -1.0, -3.0]])  # mean -2
ADVANTAGES = torch.tensor([[4.0, -2.0, NAN], [0.0, -1.0, -1.0]])  # mean 0
COVARIANCES = torch.tensor([[4.0, 2.0, 0.0], [0.0, -1.0, 1.0]], dtype=torch.float64)


def test_covariances_by_hand() -> None:
    torch.testing.assert_close(token_covariances(LOG_PROBS, ADVANTAGES, MASK), COVARIANCES)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.0, [[True, False, False], [False, False, False]]),  # at least one
        (0.4, [[True, True, False], [False, False, False]]),  # two of five tokens
        (0.79, [[True, True, False], [False, False, True]]),
        (1.0, [[True, True, False], [True, True, True]]),  # never a masked one
    ],
)
def test_kl_cov_takes_the_largest(ratio: float, expected: list[list[bool]]) -> None:
    assert kl_cov_tokens(COVARIANCES, MASK, ratio=ratio).tolist() == expected


def test_equal_covariances_are_taken_in_order() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    assert kl_cov_tokens(torch.zeros(2, 2), mask, ratio=0.5).tolist() == [[True, True], [False, False]]


@given(
    seed=st.integers(0, 2**31),
    ratio=st.floats(0.0, 1.0),
    lower=st.floats(-1.0, 0.5),
    width=st.floats(0.0, 2.0),
)
def test_clip_cov_selects_tokens_within_band(seed: int, ratio: float, lower: float, width: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 6, generator=generator) < 0.7
    mask[0, 0] = True
    covariances = torch.randn(4, 6, generator=generator)
    chosen = clip_cov_tokens(covariances, mask, ratio=ratio, lower=lower, upper=lower + width)
    band = mask & (covariances > lower) & (covariances < lower + width)
    assert not (chosen & ~band).any()
    assert int(chosen.sum()) == min(max(int(ratio * int(mask.sum())), 1), int(band.sum()))
    again = clip_cov_tokens(covariances, mask, ratio=ratio, lower=lower, upper=lower + width)
    assert torch.equal(again, chosen), "ranks would differ"


def test_clip_cov_selects_tokens_uniformly() -> None:
    mask = torch.ones(1, 2000, dtype=torch.bool)
    chosen = clip_cov_tokens(torch.full((1, 2000), 2.0), mask, ratio=0.25, lower=1.0, upper=5.0)
    assert int(chosen.sum()) == 500
    assert 200 < int(chosen[0, :1000].sum()) < 300  # the first half has half of them, within six deviations
