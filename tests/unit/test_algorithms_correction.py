import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.correction import (
    Level,
    accepted,
    mismatch_means,
    mismatch_sums,
    ratios,
    truncated_weights,
)

NAN, TWO = float("nan"), math.log(2.0)
MASK = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
ROLLOUT = torch.tensor([[-1.0, -1.0, NAN], [-1.0, -2.0, -3.0], [NAN, NAN, NAN]])
TRAINER = torch.tensor([[-1.0 + TWO, -1.0 + TWO, NAN], [-1.0 - TWO, -2.0, -3.0 + TWO], [NAN, NAN, NAN]])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[2.0, 2.0, 1.0], [0.5, 1.0, 2.0], [1.0, 1.0, 1.0]]),
        ("sequence", [[4.0, 4.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        ("geometric", [[2.0, 2.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
    ],
)
def test_ratios_by_hand(level: Level, expected: list[list[float]]) -> None:
    torch.testing.assert_close(ratios(TRAINER, ROLLOUT, MASK, level=level), torch.tensor(expected))


def test_weights_are_truncated_and_outlying_ratios_rejected() -> None:
    ratio = torch.tensor([[0.25, 1.0, 3.0, 9.0]])
    mask = torch.tensor([[True, True, True, False]])
    assert truncated_weights(ratio, mask, threshold=2.0).tolist() == [[0.25, 1.0, 2.0, 0.0]]
    assert accepted(ratio, mask, lower=0.5, upper=3.0).tolist() == [[False, True, True, False]]


def test_ratios_of_worlds_apart_stay_finite() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    for level in ("token", "sequence", "geometric"):
        assert ratios(torch.zeros(1, 2), torch.full((1, 2), -200.0), mask, level=level).isfinite().all()


def test_means_by_hand() -> None:
    metrics = mismatch_means(mismatch_sums(TRAINER[MASK], ROLLOUT[MASK], MASK.sum(-1)))
    trainer_ppl, rollout_ppl = [math.exp(1.0 - TWO), math.exp(2.0)], [math.exp(1.0), math.exp(2.0)]
    assert metrics == pytest.approx(
        {
            "rollout_corr/kl": -2 * TWO / 5,  # two twice as likely, one as likely, one half, one twice
            "rollout_corr/k3_kl": (3 * (2.0 - TWO - 1.0) + (0.5 + TWO - 1.0)) / 5,
            "rollout_corr/chi2_token": (3 * 4.0 + 1.0 + 0.25) / 5 - 1.0,
            "rollout_corr/training_log_ppl": (1.0 - TWO + 2.0) / 2,
            "rollout_corr/training_ppl": sum(trainer_ppl) / 2,
            "rollout_corr/rollout_log_ppl": (1.0 + 2.0) / 2,
            "rollout_corr/rollout_ppl": sum(rollout_ppl) / 2,
            "rollout_corr/log_ppl_diff": -TWO / 2,
            "rollout_corr/log_ppl_abs_diff": TWO / 2,
            "rollout_corr/ppl_ratio": (0.5 + 1.0) / 2,
            "rollout_corr/chi2_seq": (16.0 + 1.0) / 2 - 1.0,
        },
        rel=1e-5,
    )


@given(
    seed=st.integers(0, 2**31),
    owners=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_mismatch_means_are_independent_of_sample_split(seed: int, owners: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    trainer, rollout = -torch.rand(2, 6, 4, generator=generator)
    mask = torch.rand(6, 4, generator=generator) < 0.6
    owner = torch.tensor(owners)

    def sums(samples: torch.Tensor) -> dict[str, torch.Tensor]:
        chosen = mask[samples]
        return mismatch_sums(trainer[samples][chosen], rollout[samples][chosen], chosen.sum(-1))

    parts = [sums(owner == rank) for rank in range(3)]
    added = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    assert mismatch_means(added) == pytest.approx(mismatch_means(sums(owner >= 0)), abs=1e-12)


def test_agreement_has_no_divergence() -> None:
    metrics = mismatch_means(mismatch_sums(ROLLOUT[MASK], ROLLOUT[MASK], MASK.sum(-1)))
    zero = ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "log_ppl_abs_diff")
    assert [metrics[f"rollout_corr/{name}"] for name in zero] == [0.0] * 6
    assert metrics["rollout_corr/ppl_ratio"] == 1.0
