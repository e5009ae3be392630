"""The checks of a user's estimator and loss: built-in functions pass, and each kind of dependence is found."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import advantages, losses
from megarl.algorithms.invariance import check_estimator, check_policy_loss, estimates_of
from megarl.algorithms.losses import PolicyLoss
from megarl.algorithms.masked import masked_moments
from megarl.platform.errors import UserError

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


@pytest.mark.parametrize(
    ("loss", "kwargs"),
    [
        (losses.ppo_clip, {**CLIP, "clip_c": 3.0}),
        (losses.gspo, CLIP),
        (losses.cispo, CLIP),
        (losses.sapo, {"tau_pos": 1.0, "tau_neg": 1.05}),
        (losses.geo_mean, CLIP),
        (losses.dppo_tv, {**CLIP, "clip_c": 3.0}),
        (losses.dppo_kl, {**CLIP, "clip_c": 3.0}),
        (losses.gpg, {}),
    ],
)
def test_built_in_losses_pass(loss: Callable[..., PolicyLoss], kwargs: dict[str, float]) -> None:
    check_policy_loss(loss, **kwargs)


@pytest.mark.parametrize(
    ("estimator", "kwargs"),
    [
        (advantages.gae, {"gamma": 0.9, "lam": 0.8}),
        (advantages.grpo, {"norm_adv_by_std_in_grpo": True}),
        (advantages.rloo, {}),
        (advantages.reinforce_plus_plus, {"gamma": 0.9}),
        (advantages.reinforce_plus_plus_baseline, {}),
        (advantages.remax, {}),
        (advantages.opo, {}),
        (advantages.gpg, {}),
        (advantages.grpo_passk, {"norm_adv_by_std_in_grpo": False}),
    ],
)
def test_built_in_estimators_pass(estimator: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    check_estimator(estimator, **kwargs)


def test_an_estimator_may_standardise_over_the_batch() -> None:
    def whitened(token_rewards: Tensor, mask: Tensor) -> Tensor:
        mean, var = masked_moments(token_rewards, mask)
        return advantages.whiten(token_rewards, mask, mean=mean, var=var)

    check_estimator(whitened)


def test_arguments_may_be_changed_in_place() -> None:
    def changing(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
        groups -= groups.min()
        scores -= scores.mean()
        advantages = scores[:, None] * mask
        mask.zero_()
        return advantages

    check_estimator(changing)
    given = {"scores": torch.tensor([1.0, 3.0]), "groups": torch.tensor([4, 5]), "mask": torch.tensor([[True], [True]])}
    [found] = estimates_of(changing, given, {})
    assert found.tolist() == [[-1.0], [1.0]]
    assert given["scores"].tolist() == [1.0, 3.0]
    assert given["groups"].tolist() == [4, 5]
    assert given["mask"].all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_advantages_that_are_not_finite_are_named(value: float) -> None:
    mask = torch.tensor([[True, True], [True, False]])

    def estimator(mask: Tensor) -> Tensor:
        return torch.tensor([[0.0, 1.0], [value, 0.0]])

    with pytest.raises(UserError, match="estimator: its advantages are not all finite: see sample 1, token 0"):
        estimates_of(estimator, {"mask": mask}, {})
    [found] = estimates_of(lambda mask: torch.tensor([[0.0, 1.0], [2.0, value]]), {"mask": mask}, {})
    assert found.tolist() == [[0.0, 1.0], [2.0, 0.0]]


def test_a_loss_may_have_another_precision() -> None:
    check_policy_loss(sums_of(lambda losses, advantages, mask: losses.double()))


def sums_of(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., PolicyLoss]:
    """Return the plain policy gradient whose `[b, T]` token losses go through `change` with advantages and mask."""

    def loss(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
        return PolicyLoss.of(change(-advantages * log_probs, advantages, mask), 0.0 * log_probs, mask)

    return loss


def unmasked(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> PolicyLoss:
    ratio = (log_probs - old_log_probs).exp()
    none = torch.zeros(())
    return PolicyLoss(sums=ratio.sum(-1), clip_frac=none, clip_frac_lower=none, ppo_kl=none)


def miscounted(log_probs: Tensor, mask: Tensor) -> PolicyLoss:
    return PolicyLoss.of(log_probs, 0.0 * log_probs, mask, clip_frac=torch.tensor(1.0))


@pytest.mark.parametrize(
    ("loss", "fault"),
    [
        (
            sums_of(lambda tokens, _, mask: tokens / mask.sum()),
            "sums of a batch of . samples differ in micro-batches of",
        ),
        (sums_of(lambda tokens, a, _: tokens - a.mean()), "sums of a batch of . samples differ in micro-batches of"),
        (sums_of(lambda tokens, _, mask: tokens / mask.shape[1]), "sums of a batch of . samples differ with padding"),
        (sums_of(lambda tokens, a, _: (tokens - tokens.detach()) * len(a)), "gradient of a batch of . samples differ"),
        (sums_of(lambda tokens, a, mask: tokens.detach()), "has no gradient: its sums must depend on log_probs"),
        (sums_of(lambda tokens, a, mask: tokens / 0.0), "not all finite"),
        (unmasked, "sums of a batch of . samples differ with padding"),
        (miscounted, "counts of a batch of . samples differ in micro-batches of"),
        (lambda log_probs: log_probs.sum(), "returns of type Tensor, not a PolicyLoss: see PolicyLoss.of"),
        (
            lambda log_probs: PolicyLoss(sums=log_probs.sum(), clip_frac=0.0, clip_frac_lower=0.0, ppo_kl=0.0),  # type: ignore[arg-type]
            r"its sums are of shape \[\], not a tensor of shape \[[0-9]\]",
        ),
    ],
)
def test_loss_depending_on_other_rows_is_refused(loss: Callable[..., PolicyLoss], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        check_policy_loss(loss)


def per_token(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def estimator(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
        return change(scores, groups)[:, None] * mask

    return estimator


@pytest.mark.parametrize(
    ("estimator", "fault"),
    [
        (lambda scores, mask: (scores / mask.shape[1])[:, None] * mask, "differ with padding"),
        (per_token(lambda scores, _: scores - scores[0]), "differ in another order of the samples"),
        (per_token(lambda scores, groups: scores * groups), "differ with other numbers for the groups"),
        (per_token(lambda scores, _: scores + torch.rand(len(scores))), "draws no random numbers"),
        (per_token(lambda scores, _: scores / 0.0), "not all finite"),
        (lambda scores: scores, r"its advantages are of shape \[.\], not a tensor of shape \[., .\]"),
        (lambda token_rewards: token_rewards.tolist(), "its advantages are of type list, not a tensor"),
        (lambda token_rewards: (token_rewards,) * 3, "returns 3 values: return advantages, or advantages, returns"),
        (lambda token_rewards: (token_rewards, token_rewards.sum(-1)), r"its returns are of shape \[.\]"),
    ],
)
def test_estimator_depending_on_other_samples_is_refused(estimator: Callable[..., Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        check_estimator(estimator)


def test_the_checks_draw_nothing_from_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    check_policy_loss(losses.gpg)
    check_estimator(advantages.rloo)
    assert torch.equal(before, torch.random.get_rng_state())
