"""Losses of pairs of rewards, worked by hand, and the objective made of them: any division of the pairs adds up."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.losses import Totals, bradley_terry, reward_centering
from megarl.batch import Preferences
from megarl.data.conversations import scoring_batch
from megarl.training.objectives import PreferenceObjective

NUM_PAIRS = 5


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "loss", "gradient"),
    [  # the gradient is with respect to the chosen reward: sigmoid(r_chosen - r_rejected - margin) - 1
        (0.0, 0.0, 0.0, math.log(2), -0.5),  # nothing known
        (math.log(3), 0.0, 0.0, math.log(4 / 3), -0.25),  # three to one
        (0.0, math.log(3), 0.0, math.log(4), -0.75),  # three to one for the wrong one
        (2.0, 1.0, 1.0, math.log(2), -0.5),  # ahead by no more than the margin
        (1.0, 2.0, -1.0, math.log(2), -0.5),
        (-200.0, 200.0, 0.0, 400.0, -1.0),  # beyond exp in float32
    ],
)
def test_bradley_terry_case_by_case(
    chosen: float, rejected: float, margin: float, loss: float, gradient: float
) -> None:
    better, worse = torch.tensor([chosen], requires_grad=True), torch.tensor([rejected], requires_grad=True)
    losses = bradley_terry(better, worse, torch.tensor([margin]))
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss, rel=1e-6)
    assert better.grad is not None and worse.grad is not None
    assert better.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert worse.grad.item() == pytest.approx(-gradient, rel=1e-6)


def test_reward_centering_by_hand() -> None:
    squares = reward_centering(torch.tensor([1.0, 2.0, -1.0]), torch.tensor([-1.0, 1.0, -1.0]))
    assert squares.tolist() == [0.0, 9.0, 4.0]


def test_the_objective_by_hand() -> None:
    scores = torch.tensor([math.log(3), 0.0, 1.0, 1.0])
    batch = scoring_batch([[1]] * 4).extend(Preferences, margins=torch.zeros(4))
    totals = Totals.of(batch.num_learnt())
    loss, metrics = PreferenceObjective(0.0)(scores, batch, totals)
    expected = (math.log(4 / 3) + math.log(2)) / 2
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "reward_model/loss": expected,
            "reward_model/accuracy": 0.75,  # one right, and a tie
            "reward_model/margin/mean": math.log(3) / 2,
            "reward_model/score/mean": (math.log(3) + 2.0) / 4,
        }
    )
    assert loss.item() == pytest.approx(expected)
    centred, metrics = PreferenceObjective(0.1)(scores, batch, totals)
    assert centred.item() == pytest.approx(expected + 0.1 * (math.log(3) ** 2 + 4.0) / 2)
    assert metrics["reward_model/loss"].item() == pytest.approx(expected)  # comparable whatever is added


@given(owners=st.lists(st.integers(0, 2), min_size=NUM_PAIRS, max_size=NUM_PAIRS))
def test_any_split_of_pairs_sums_to_full_loss(owners: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    margins = torch.randn(NUM_PAIRS, generator=generator).repeat_interleave(2)
    whole = scoring_batch([[1]] * (2 * NUM_PAIRS)).extend(Preferences, margins=margins)
    scores = torch.randn(2 * NUM_PAIRS, generator=generator).requires_grad_()
    totals, objective = Totals.of(whole.num_learnt()), PreferenceObjective(0.1)
    loss, metrics = objective(scores, whole, totals)
    (gradient,) = torch.autograd.grad(loss, scores)

    parts = []
    for rank in range(3):
        samples = torch.tensor([2 * pair + k for pair, owner in enumerate(owners) if owner == rank for k in (0, 1)])
        parts.append(objective(scores[samples.long()], whole.select(samples.long()), totals))
    loss_of_parts = torch.stack([part_loss for part_loss, _ in parts]).sum()
    torch.testing.assert_close(loss_of_parts, loss)
    torch.testing.assert_close(torch.autograd.grad(loss_of_parts, scores)[0], gradient)
    for name, value in metrics.items():
        torch.testing.assert_close(sum(part_metrics[name] for _, part_metrics in parts), value)
        assert not value.requires_grad
