import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.config import LossAggregation
from megarl.algorithms.losses import Totals, aggregate, entropy, lm_cross_entropy, ppo_clip, value_clip

NAN = float("nan")
TRUE = torch.tensor([[True]])
MODES: list[LossAggregation] = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "clipped_lower"),
    [  # clip range [0.8, 1.3], dual clip at 3; the gradient is with respect to the log-probability
        (1.1, 2.0, -2.2, -2.2, 0, 0),  # inside: the plain policy gradient
        (1.1, -2.0, 2.2, 2.2, 0, 0),
        (1.5, 2.0, -2.6, 0.0, 1, 0),  # good and already likelier: enough
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # good and less likely: pulled back
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # bad and already less likely: enough
        (1.5, -2.0, 3.0, 3.0, 0, 0),  # bad and likelier: pushed down
        (4.0, -2.0, 6.0, 0.0, 0, 1),  # bad and much likelier: the dual clip holds
        (4.0, 2.0, -2.6, 0.0, 1, 0),  # no dual clip if the advantage is positive
    ],
)
def test_ppo_clip_case_by_case(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: int, clipped_lower: int
) -> None:
    log_probs = torch.tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    result = ppo_clip(
        log_probs, torch.tensor([[-1.0]]), torch.tensor([[advantage]]), TRUE, clip_low=0.2, clip_high=0.3, clip_c=3.0
    )
    result.sums.sum().backward()
    assert result.sums.item() == pytest.approx(loss, rel=1e-5)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(gradient, rel=1e-5)
    assert (result.clip_frac.item(), result.clip_frac_lower.item()) == (clipped, clipped_lower)
    assert result.ppo_kl.item() == pytest.approx(-math.log(ratio), rel=1e-5)


def test_ppo_clip_has_the_gradient_of_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs, old_log_probs, advantages = torch.randn(3, 4, 5, dtype=torch.float64, generator=generator)
    mask = torch.rand(4, 5, generator=generator) < 0.7

    def loss(x: Tensor) -> Tensor:
        return ppo_clip(x, old_log_probs, advantages, mask, clip_low=0.2, clip_high=0.3, clip_c=3.0).sums

    assert torch.autograd.gradcheck(loss, log_probs.requires_grad_())


def test_a_ratio_beyond_float32_leaves_finite_gradients() -> None:
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    result = ppo_clip(
        log_probs, torch.tensor([[-150.0]]), torch.tensor([[1.0]]), TRUE, clip_low=0.2, clip_high=0.2, clip_c=3.0
    )
    result.sums.sum().backward()
    assert result.sums.item() == pytest.approx(-1.2)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == 0.0


@pytest.mark.parametrize(
    ("value", "loss", "gradient", "clipped"),
    [  # old value 0, return 2, range 0.5
        (0.3, 0.5 * 1.7**2, -1.7, 0),  # inside the range
        (1.0, 0.5 * 1.5**2, 0.0, 1),  # towards the return, past the range: held at 0.5
        (-1.0, 0.5 * 3.0**2, -3.0, 0),  # away from the return: pulled back
    ],
)
def test_value_clip_case_by_case(value: float, loss: float, gradient: float, clipped: int) -> None:
    values = torch.tensor([[value]], requires_grad=True)
    result = value_clip(values, torch.tensor([[0.0]]), torch.tensor([[2.0]]), TRUE, clip_range=0.5)
    result.sums.sum().backward()
    assert result.sums.item() == pytest.approx(loss)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(gradient)
    assert result.clip_frac.item() == clipped


def test_entropy_and_cross_entropy_are_sums_over_tokens() -> None:
    x, mask = torch.tensor([[-1.0, -2.0], [-4.0, NAN]]), torch.tensor([[True, True], [True, False]])
    assert entropy(-x, mask).tolist() == [3.0, 4.0]
    assert lm_cross_entropy(x, mask).tolist() == [3.0, 4.0]


def test_aggregate_by_hand() -> None:
    sums, counts = torch.tensor([6.0, 2.0]), torch.tensor([3, 1])
    losses = [aggregate(sums, counts, mode=mode, num_tokens=4, num_sequences=2, horizon=8).item() for mode in MODES]
    assert losses == [2.0, 4.0, 2.0, 0.5]
    uneven = aggregate(
        torch.tensor([6.0, 4.0]), counts, mode="seq-mean-token-mean", num_tokens=4, num_sequences=2, horizon=8
    )
    assert uneven.item() == 3.0


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    owners=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    mode=st.sampled_from(MODES),
)
def test_any_split_adds_up_to_the_same_loss(lengths: list[int], owners: list[int], mode: LossAggregation) -> None:
    counts = torch.tensor(lengths)
    sums = torch.linspace(-1.0, 2.0, len(lengths), dtype=torch.float64)
    totals = Totals.of(counts)
    size = {"num_tokens": max(totals.num_tokens, 1), "num_sequences": totals.num_sequences, "horizon": 7}
    whole = aggregate(sums, counts, mode=mode, **size)
    owner = torch.tensor(owners[: len(lengths)])
    parts = [aggregate(sums[owner == rank], counts[owner == rank], mode=mode, **size) for rank in range(4)]
    torch.testing.assert_close(sum(parts), whole)


@given(seed=st.integers(0, 2**31))
def test_masked_tokens_never_matter(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 4, generator=generator) < 0.5
    clean = [torch.randn(3, 4, generator=generator) for _ in range(3)]
    dirty = [x.masked_fill(~mask, NAN) for x in clean]
    for loss in (
        lambda x: ppo_clip(x[0], x[1], x[2], mask, clip_low=0.2, clip_high=0.2, clip_c=3.0).sums,
        lambda x: value_clip(x[0], x[1], x[2], mask, clip_range=0.2).sums,
        lambda x: entropy(x[0], mask) + lm_cross_entropy(x[0], mask),
    ):
        with_garbage = [x.clone().requires_grad_() for x in dirty]
        sums = loss(with_garbage)
        assert torch.equal(sums, loss(clean))
        sums.sum().backward()
        assert with_garbage[0].grad is not None
        assert with_garbage[0].grad.isfinite().all()
        assert not with_garbage[0].grad[~mask].any()
