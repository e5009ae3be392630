"""Policy losses besides PPO's: case by case, against their papers' formulas, and in any split."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.config import LossAggregation
from megarl.algorithms.losses import (
    PolicyLoss,
    Totals,
    aggregate,
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    geo_mean,
    gpg,
    gspo,
    kl_cov,
    ppo_clip,
    sapo,
)

NAN = float("nan")
NUM_SAMPLES, NUM_TOKENS = 6, 5
MODES: list[LossAggregation] = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], PolicyLoss]
LOSSES: dict[str, Loss] = {  # of log_probs, old_log_probs, advantages, mask, chosen
    "ppo_clip": lambda x, old, a, mask, chosen: ppo_clip(x, old, a, mask, clip_low=0.2, clip_high=0.3, clip_c=3.0),
    "gspo": lambda x, old, a, mask, chosen: gspo(x, old, a, mask, clip_low=0.2, clip_high=0.3),
    "cispo": lambda x, old, a, mask, chosen: cispo(x, old, a, mask, clip_low=0.2, clip_high=0.3),
    "sapo": lambda x, old, a, mask, chosen: sapo(x, old, a, mask, tau_pos=1.0, tau_neg=1.05),
    "geo_mean": lambda x, old, a, mask, chosen: geo_mean(x, old, a, mask, clip_low=0.2, clip_high=0.3),
    "dppo_tv": lambda x, old, a, mask, chosen: dppo_tv(x, old, a, mask, clip_low=0.1, clip_high=0.2, clip_c=3.0),
    "dppo_kl": lambda x, old, a, mask, chosen: dppo_kl(x, old, a, mask, clip_low=0.02, clip_high=0.1, clip_c=3.0),
    "gpg": lambda x, old, a, mask, chosen: gpg(x, old, a, mask),
    "clip_cov": lambda x, old, a, mask, chosen: clip_cov(x, old, a, mask, chosen=chosen, clip_low=0.2, clip_high=0.3),
    "kl_cov": lambda x, old, a, mask, chosen: kl_cov(x, old, a, mask, chosen=chosen, kl_coef=0.5),
}


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, those before the update, advantages, a mask, some chosen tokens."""
    generator = torch.Generator().manual_seed(0)
    logits, old_logits, advantages = torch.randn(3, NUM_SAMPLES, NUM_TOKENS, generator=generator, dtype=dtype)
    log_probs, old_log_probs = (torch.nn.functional.logsigmoid(each) for each in (logits, old_logits))
    mask = torch.arange(NUM_TOKENS) < torch.tensor([5, 1, 3, 0, 2, 5])[:, None]
    chosen = torch.rand(NUM_SAMPLES, NUM_TOKENS, generator=generator) < 0.5
    return log_probs, old_log_probs, advantages, mask, chosen


def single(ratio: float, advantage: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token that is now `ratio` times as likely, with a probability of exp(-1) before."""
    log_probs = torch.tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    return log_probs, torch.tensor([[-1.0]]), torch.tensor([[advantage]]), torch.tensor([[True]])


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [(1.1, 2.0, 1.1, 0), (1.5, 2.0, 1.3, 1), (0.5, 2.0, 0.8, 1), (1.5, -2.0, 1.3, 1), (0.5, -2.0, 0.8, 1)],
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(
    ratio: float, advantage: float, weight: float, clipped: int
) -> None:
    tensors = single(ratio, advantage)
    result = cispo(*tensors, clip_low=0.2, clip_high=0.3)
    result.sums.sum().backward()
    assert result.sums.item() == pytest.approx(-weight * advantage * (math.log(ratio) - 1.0), rel=1e-5)
    assert tensors[0].grad is not None
    assert tensors[0].grad.item() == pytest.approx(-weight * advantage, rel=1e-5)
    assert result.clip_frac.item() == clipped
    assert result.ppo_kl.item() == pytest.approx(-math.log(ratio), rel=1e-5)


def test_gpg_is_the_plain_policy_gradient() -> None:
    tensors = single(1.5, 2.0)
    result = gpg(*tensors)
    result.sums.sum().backward()
    assert result.sums.item() == pytest.approx(-2.0 * (math.log(1.5) - 1.0))
    assert tensors[0].grad is not None
    assert tensors[0].grad.item() == -2.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "chosen", "loss", "gradient", "clipped"),
    [
        (1.1, 2.0, False, -2.2, -2.2, 0),
        (1.5, 2.0, False, -2.6, 0.0, 1),
        (1.1, 2.0, True, 0.0, 0.0, 1),
        (4.0, -2.0, False, 8.0, 8.0, 0),  # no dual clip
    ],
)
def test_clip_cov_leaves_the_chosen_tokens_out(
    ratio: float, advantage: float, chosen: bool, loss: float, gradient: float, clipped: int
) -> None:
    tensors = single(ratio, advantage)
    result = clip_cov(*tensors, chosen=torch.tensor([[chosen]]), clip_low=0.2, clip_high=0.3)
    result.sums.sum().backward()
    assert result.sums.item() == pytest.approx(loss, rel=1e-5)
    assert tensors[0].grad is not None
    assert tensors[0].grad.item() == pytest.approx(gradient, rel=1e-5)
    assert result.clip_frac.item() == clipped


@pytest.mark.parametrize(
    ("ratio", "chosen", "loss", "gradient"),
    [
        (1.5, False, -3.0, -3.0),  # nothing is clipped
        (1.5, True, -3.0 + 0.5 * math.log(1.5), -3.0 + 0.5),
        (0.5, True, -1.0 + 0.5 * math.log(2.0), -1.0 - 0.5),
    ],
)
def test_kl_cov_penalises_the_chosen_tokens(ratio: float, chosen: bool, loss: float, gradient: float) -> None:
    tensors = single(ratio, 2.0)
    result = kl_cov(*tensors, chosen=torch.tensor([[chosen]]), kl_coef=0.5)
    result.sums.sum().backward()
    assert result.sums.item() == pytest.approx(loss, rel=1e-5)
    assert tensors[0].grad is not None
    assert tensors[0].grad.item() == pytest.approx(gradient, rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage"), [(1.0, 2.0), (1.5, 2.0), (0.5, 2.0), (1.5, -2.0), (0.5, -2.0), (1.5, 0.0)]
)
def test_sapo_fades_the_gradient_without_a_clip(ratio: float, advantage: float) -> None:
    """The gradient of the paper's eq. 6: 4 p (1 - p) rho A with p = sigmoid(tau (rho - 1))."""
    tensors = single(ratio, advantage)
    result = sapo(*tensors, tau_pos=1.0, tau_neg=2.0)
    result.sums.sum().backward()
    tau = 1.0 if advantage > 0 else 2.0
    share = 1.0 / (1.0 + math.exp(-tau * (ratio - 1.0)))
    assert result.sums.item() == pytest.approx(-advantage * share * 4.0 / tau, rel=1e-5)
    assert tensors[0].grad is not None
    assert tensors[0].grad.item() == pytest.approx(-advantage * 4.0 * share * (1.0 - share) * ratio, rel=1e-5)
    assert result.clip_frac.item() == 0


@pytest.mark.parametrize(
    ("before", "after", "advantage", "leaves_tv", "leaves_kl"),
    [
        (0.5, 0.55, 2.0, False, False),
        (0.5, 0.75, 2.0, True, True),  # KL: 0.144
        (0.001, 0.01, 2.0, False, False),  # PPO would clip a ratio of 10
        (0.5, 0.25, 2.0, False, False),  # it returns to the old probability
        (0.5, 0.25, -2.0, True, True),
        (0.5, 0.75, -2.0, False, False),
        (0.05, 0.2, 2.0, False, False),  # KL: 0.094
        (0.05, 0.2, -2.0, False, False),
        (0.2, 0.04, -2.0, True, True),  # KL: 0.176
        (0.02, 0.001, -2.0, False, True),  # KL: 0.041
    ],
)
def test_dppo_leaves_out_tokens_outside_its_region(
    before: float, after: float, advantage: float, leaves_tv: bool, leaves_kl: bool
) -> None:
    for loss, low, high, leaves in ((dppo_tv, 0.1, 0.2, leaves_tv), (dppo_kl, 0.03, 0.1, leaves_kl)):
        log_probs = torch.tensor([[math.log(after)]], requires_grad=True)
        tensors = (log_probs, torch.tensor([[math.log(before)]]), torch.tensor([[advantage]]), torch.tensor([[True]]))
        result = loss(*tensors, clip_low=low, clip_high=high, clip_c=3.0)
        result.sums.sum().backward()
        weight = 0.0 if leaves else min(after / before, 3.0)
        assert result.sums.item() == pytest.approx(-weight * advantage * math.log(after), rel=1e-5, abs=1e-9)
        assert log_probs.grad is not None
        assert log_probs.grad.item() == pytest.approx(-weight * advantage, rel=1e-5, abs=1e-9)
        assert result.clip_frac.item() == leaves
        assert result.clip_frac_lower.item() == (after / before > 3.0 and not leaves)


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
def test_dppo_counts_no_token_that_stays(loss: Callable[..., PolicyLoss]) -> None:
    """An advantage of 0 moves no probability, though others have moved it far down or up."""
    old, log_probs = torch.tensor([[0.9, 0.05]]).log(), torch.tensor([[0.1, 0.95]]).log()
    mask = torch.ones(1, 2, dtype=torch.bool)
    result = loss(log_probs, old, torch.zeros(1, 2), mask, clip_low=0.1, clip_high=0.1, clip_c=30.0)
    assert (result.clip_frac.item(), result.clip_frac_lower.item()) == (0, 0)


def gspo_objective(log_ratio: Tensor, advantage: Tensor) -> Tensor:
    ratio = log_ratio.mean().exp()
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)


def geo_mean_objective(log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """Equation 4 of the paper: its product over tokens, with the sign of the advantage inside the minimum."""
    sign = advantage.sign()
    held = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-0.2, 0.3))
    return held.exp().prod() ** (1.0 / len(log_ratio)) * advantage


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_tokens_of_sequence_have_one_ratio(name: str) -> None:
    """To the last bit: a likely and an unlikely token are clipped alike."""
    old = torch.tensor([[-1e-3, -30.0, -7.0]])
    log_probs = old + torch.tensor([[1e-4, 2e-4, 3e-4]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    of_token = [LOSSES[name](log_probs, old, torch.eye(3)[token][None], mask, ~mask).sums.item() for token in range(3)]
    assert of_token[0] == of_token[1] == of_token[2] < -1.0


@pytest.mark.parametrize(
    ("name", "objective_of"), [("gspo", gspo_objective), ("geo_mean", geo_mean_objective)], ids=["gspo", "geo_mean"]
)
def test_loss_and_gradient_match_paper(name: str, objective_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    log_probs, old_log_probs, advantages, mask, chosen = example()
    advantages = advantages[:, :1].expand_as(mask)  # one for a sequence
    x = log_probs.clone().requires_grad_()
    totals = Totals.of(mask.sum(-1))
    result = LOSSES[name](x, old_log_probs, advantages, mask, chosen)
    loss = aggregate(
        result.sums,
        mask.sum(-1),
        mode="seq-mean-token-mean",
        num_tokens=totals.num_tokens,
        num_sequences=totals.num_sequences,
        horizon=NUM_TOKENS,
    )
    rows = [row for row in range(NUM_SAMPLES) if mask[row].any()]
    objective = torch.zeros((), dtype=torch.float64)
    for row in rows:
        objective = objective + objective_of((x[row] - old_log_probs[row])[mask[row]], advantages[row, 0]) / len(rows)
    torch.testing.assert_close(loss, -objective)
    (gradient,), (expected,) = torch.autograd.grad(loss, x), torch.autograd.grad(-objective, x)
    torch.testing.assert_close(gradient, expected)
    assert gradient.any()
    found = [(log_probs[row] - old_log_probs[row])[mask[row]].mean().exp().item() for row in rows]
    assert min(found) < 0.8 and max(found) > 1.3, "the example has no clipped sequences"


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_never_matter(name: str) -> None:
    log_probs, old_log_probs, advantages, mask, chosen = example()
    expected = LOSSES[name](log_probs, old_log_probs, advantages, mask, chosen)
    x, old, a = (tensor.masked_fill(~mask, NAN) for tensor in (log_probs, old_log_probs, advantages))
    x.requires_grad_()
    result = LOSSES[name](x, old, a, mask, chosen)
    for part in ("sums", "clip_frac", "clip_frac_lower", "ppo_kl"):
        assert torch.equal(getattr(result, part), getattr(expected, part))
    result.sums.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert not x.grad[~mask].any()


@pytest.mark.parametrize("name", LOSSES)
def test_far_from_the_old_policy_everything_stays_finite(name: str) -> None:
    x = torch.tensor([[-1.0, -400.0]], requires_grad=True)
    ones = torch.ones(1, 2, dtype=torch.bool)
    result = LOSSES[name](x, torch.tensor([[-400.0, -1.0]]), torch.tensor([[1.0, -1.0]]), ones, ones)
    result.sums.sum().backward()
    assert result.sums.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    "name", ["ppo_clip", "gspo", "cispo", "sapo", "geo_mean", "dppo_tv", "dppo_kl", "gpg", "clip_cov"]
)
def test_positive_advantage_factor_scales_loss(name: str) -> None:
    log_probs, old_log_probs, advantages, mask, chosen = example()
    factors = torch.rand(NUM_SAMPLES, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weighted = LOSSES[name](log_probs, old_log_probs, factors * advantages, mask, chosen)
    plain = LOSSES[name](log_probs, old_log_probs, advantages, mask, chosen)
    torch.testing.assert_close(weighted.sums, factors[:, 0] * plain.sums)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@given(owners=st.lists(st.integers(0, 2), min_size=NUM_SAMPLES, max_size=NUM_SAMPLES))
def test_any_split_adds_up_to_the_whole(name: str, mode: LossAggregation, owners: list[int]) -> None:
    log_probs, *others = example()
    mask = others[2]
    totals = Totals.of(mask.sum(-1))

    def contribution(x: Tensor, rows: Tensor) -> tuple[Tensor, PolicyLoss]:
        result = LOSSES[name](x[rows], *(tensor[rows] for tensor in others))
        size = {"num_tokens": totals.num_tokens, "num_sequences": totals.num_sequences, "horizon": NUM_TOKENS}
        return aggregate(result.sums, mask[rows].sum(-1), mode=mode, **size), result

    x, x_parts = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    whole, statistics = contribution(x, torch.arange(NUM_SAMPLES))
    owner = torch.tensor(owners)
    parts = [contribution(x_parts, (owner == rank).nonzero()[:, 0]) for rank in range(3)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for part in ("clip_frac", "clip_frac_lower", "ppo_kl"):
        torch.testing.assert_close(sum(getattr(result, part) for _, result in parts), getattr(statistics, part))
    (gradient,) = torch.autograd.grad(whole, x)
    (gradient_of_parts,) = torch.autograd.grad(sum(loss for loss, _ in parts), x_parts)
    torch.testing.assert_close(gradient_of_parts, gradient)


def test_mini_batch_without_tokens_has_zero_loss() -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    totals = Totals.of(mask.sum(-1))
    for mode in MODES:
        size = {"num_tokens": totals.num_tokens, "num_sequences": totals.num_sequences, "horizon": 3}
        assert aggregate(torch.zeros(2), mask.sum(-1), mode=mode, **size).item() == 0.0
