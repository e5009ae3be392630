"""From scored rollouts to experience: token rewards, advantages, returns, and what a user wants to see of them.

Invariant: records are replicated, so every rank estimates from the whole batch, and moments need no communication.
"""

from typing import assert_never

import torch
from torch import Tensor

from megarl.algorithms.advantages import gae, grpo, token_rewards, whiten
from megarl.algorithms.config import AlgorithmSection
from megarl.algorithms.masked import masked_moments
from megarl.batch import Experience, Scored

Metrics = dict[str, float]


def estimate(
    scored: Scored,
    old_log_probs: Tensor,
    ref_log_probs: Tensor | None,
    values: Tensor | None,
    *,
    algorithm: AlgorithmSection,
    kl_coef: float | None,
) -> tuple[Experience, Metrics]:
    """Advantages and returns of a whole batch, with their metrics.

    Args:
        scored: `B` samples of `T` tokens.
        old_log_probs: `[B, T]` float32 of the actor that sampled.
        ref_log_probs: `[B, T]` of the reference; None where no KL is asked for.
        values: `[B, T]` of the critic; None without one. GAE needs it.
        algorithm: the estimator and its numbers.
        kl_coef: weight of the KL penalty in the reward; None keeps the KL out of the reward.
    """
    mask = scored.mask
    reference = old_log_probs if ref_log_probs is None else ref_log_probs
    rewards, kl = token_rewards(
        scored.scores, old_log_probs, reference, mask, kl_coef=kl_coef or 0.0, kl_type=algorithm.kl_penalty
    )
    match algorithm.adv_estimator:
        case "gae":
            assert values is not None, "GAE without a critic"
            advantages, returns = gae(rewards, values, mask, gamma=algorithm.gamma, lam=algorithm.lam)
            mean, var = masked_moments(advantages, mask)
            advantages = whiten(advantages, mask, mean=mean, var=var)
        case "grpo":
            advantages = grpo(rewards.sum(-1), scored.groups, mask, normalize_by_std=algorithm.norm_adv_by_std_in_grpo)
            returns = torch.zeros_like(advantages)
        case unknown:
            assert_never(unknown)
    experience = scored.extend(
        Experience,
        old_log_probs=old_log_probs,
        ref_log_probs=reference,
        values=torch.zeros_like(advantages) if values is None else values,
        advantages=advantages,
        returns=returns,
    )
    metrics = _reward_metrics(experience, rewards) | _length_metrics(experience)
    if values is not None:
        metrics |= _critic_metrics(experience)
    if kl_coef is not None:
        # The mean over samples of their mean per token: what the KL controller is told.
        mean_kl = (kl.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
        metrics |= {"actor/reward_kl_penalty": float(mean_kl), "actor/reward_kl_penalty_coeff": kl_coef}
    return experience, metrics


def mismatch_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Metrics:
    """How far the trainer's probabilities of the sampled tokens `[B, T]` are from the engine's.

    Under 0.005 in the mean is usual in bfloat16; in float32 the two should agree to many digits.
    """
    difference = (old_log_probs.exp() - rollout_log_probs.exp()).abs()
    mean, var = masked_moments(difference, mask)
    return {
        "training/rollout_probs_diff_max": float(difference[mask].max()),
        "training/rollout_probs_diff_mean": float(mean),
        "training/rollout_probs_diff_std": float(var.sqrt()),
    }


def _spread(name: str, x: Tensor) -> Metrics:
    x = x.to(torch.float32)
    return {f"{name}/mean": float(x.mean()), f"{name}/max": float(x.max()), f"{name}/min": float(x.min())}


def _reward_metrics(experience: Experience, rewards: Tensor) -> Metrics:
    return (
        _spread("critic/score", experience.scores)
        | _spread("critic/rewards", rewards.sum(-1))
        | _spread("critic/advantages", experience.advantages[experience.mask])
    )


def _critic_metrics(experience: Experience) -> Metrics:
    mask = experience.mask
    _, var_of_error = masked_moments(experience.returns - experience.values, mask)
    _, var_of_returns = masked_moments(experience.returns, mask)
    return (
        _spread("critic/returns", experience.returns[mask])
        | _spread("critic/values", experience.values[mask])
        | {"critic/vf_explained_var": float(1.0 - var_of_error / (var_of_returns + 1e-5))}
    )


def _length_metrics(experience: Experience) -> Metrics:
    prompt_lengths = torch.tensor([len(prompt.token_ids) for prompt in experience.prompts])
    return (
        _spread("response_length", experience.mask.sum(-1))
        | _spread("prompt_length", prompt_lengths)
        | {"response_length/clip_ratio": float(experience.truncated.float().mean())}
    )
