"""Turns scored rollouts into experience: token rewards, advantages, returns, and their metrics.

Invariant: records are replicated, so every rank estimates from the full batch, and moments need no communication.
"""

import torch
from torch import Tensor

from megarl.algorithms import advantages as estimators
from megarl.algorithms.advantages import token_rewards, whiten
from megarl.algorithms.config import AlgorithmSection, OverlongBufferSection, RolloutCorrectionSection
from megarl.algorithms.correction import accepted, mismatch_means, mismatch_sums, ratios, truncated_weights
from megarl.algorithms.invariance import estimates_of
from megarl.algorithms.kl import kl_penalty
from megarl.algorithms.masked import masked, masked_mean, masked_moments
from megarl.algorithms.shaping import overlong_penalty
from megarl.batch import Experience, Rollouts, Scored
from megarl.training.custom import CustomEstimator
from megarl.training.interfaces import Metrics


def estimate(
    scored: Scored,
    old_log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
    values: Tensor | None,
    baselines: Tensor | None = None,
    *,
    algorithm: AlgorithmSection,
    kl_coef: float | None,
    exact_kl: Tensor | None = None,
    custom: CustomEstimator | None = None,
) -> tuple[Experience, Metrics]:
    """Compute advantages and returns of a full batch, with metrics.

    Args:
        scored: `B` samples of `N` tokens.
        old_log_probs: `[N]` float32 of the actor that sampled; None: not known yet, so that neither a KL in the
            reward nor a correction can be computed.
        ref_log_probs: `[N]` of the reference; None if no KL is estimated from them.
        values: `[N]` of the critic; None without one. GAE needs it.
        baselines: `[B]` rewards of the greedy responses; None if none were drawn. ReMax needs them.
        algorithm: the estimator and its parameters.
        kl_coef: weight of the KL penalty in the reward; None keeps the KL out of the reward.
        exact_kl: `[N]` of the actor from the reference; the exact kinds of `kl_penalty` need it.
        custom: the user's estimator; `adv_estimator=custom` needs it.
    """
    mask = scored.mask
    kl = torch.zeros(mask.shape)
    if kl_coef is not None:
        kl = _divergence(old_log_probs, ref_log_probs, exact_kl, mask, algorithm)
    if scored.turn_rewards is None:
        scores = response_rewards(scored, algorithm.overlong_buffer)
        rewards = scored.flat(token_rewards(scores, scored.rows(kl), scored.rows(mask), kl_coef=kl_coef or 0.0))
    else:
        rewards = masked(scored.turn_rewards - (kl_coef or 0.0) * kl, mask)
    advantages, returns = _advantages(scored, rewards, values, baselines, algorithm, custom)
    weights, weight_metrics = _correction(scored, old_log_probs, algorithm.rollout_correction)
    experience = scored.extend(
        Experience,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        values=torch.zeros_like(advantages) if values is None else values,
        advantages=advantages,
        weights=weights,
        returns=returns,
    )
    metrics = _reward_metrics(scored, rewards, advantages) | _length_metrics(experience) | weight_metrics
    if baselines is not None:
        metrics |= _spread("critic/baselines", baselines)
    if values is not None:
        metrics |= _critic_metrics(experience)
    if kl_coef is not None:
        # The mean over samples of their mean per token: the input of the KL controller.
        mean_kl = (scored.sums(kl) / scored.num_learnt().clamp(min=1)).mean()
        metrics |= {"actor/reward_kl_penalty": float(mean_kl), "actor/reward_kl_penalty_coeff": kl_coef}
    if algorithm.mask_truncated_completions:
        experience = experience.without_responses(scored.truncated)
    return experience, metrics


def _divergence(
    old_log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
    exact_kl: Tensor | None,
    mask: Tensor,
    algorithm: AlgorithmSection,
) -> Tensor:
    """Return the `[N]` divergence of the sampling actor from the reference, zero outside the mask."""
    match algorithm.kl_penalty:
        case "full" | "full_forward" | "full_js":
            assert exact_kl is not None, "log-probabilities that were not taken against the reference"
            return masked(exact_kl, mask)
        case kind:
            assert old_log_probs is not None and ref_log_probs is not None, (
                "a KL in the reward without log-probabilities"
            )
            old = masked(old_log_probs, mask)
            ref = masked(ref_log_probs, mask)
            return kl_penalty(old, ref, kind=kind, k3_bound=algorithm.kl_penalty_k3_bound)


def response_rewards(scored: Scored, section: OverlongBufferSection) -> Tensor:
    """Return the scores, less the penalty for long responses if it is enabled: `[B]` float32."""
    if not section.enable:
        return scored.scores
    return scored.scores + overlong_penalty(
        scored.num_learnt(), max_length=section.max_resp_len, buffer=section.len, factor=section.penalty_factor
    )


def _advantages(
    scored: Scored,
    rewards: Tensor,
    values: Tensor | None,
    baselines: Tensor | None,
    algorithm: AlgorithmSection,
    custom: CustomEstimator | None,
) -> tuple[Tensor, Tensor]:
    """Return the `[N]` advantages of the configured estimator, and returns, which are zero without a critic."""
    given = {
        "token_rewards": scored.rows(rewards),
        "scores": scored.sums(rewards).to(torch.float32),
        "groups": scored.groups,
        "mask": scored.rows(scored.mask),
    }
    given |= {} if values is None else {"values": scored.rows(values)}
    given |= {} if baselines is None else {"baselines": baselines}
    if custom:
        advantages, *more = map(scored.flat, custom(given))
    else:
        keys = {key: getattr(algorithm, key) for key in algorithm.estimator.reads}
        found = estimates_of(getattr(estimators, algorithm.adv_estimator), given, keys)
        advantages, *more = map(scored.flat, found)
        if algorithm.estimator.whitens:
            advantages = _whitened(advantages, scored.mask)
    return advantages, more[0] if more else torch.zeros_like(rewards)


def _whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    mean, var = masked_moments(advantages, mask)
    return whiten(advantages, mask, mean=mean, var=var)


def _correction(
    scored: Scored, old_log_probs: Tensor | None, section: RolloutCorrectionSection
) -> tuple[Tensor, Metrics]:
    """Return `[N]` factors of the advantages that correct for the engine's probabilities, with metrics."""
    metrics = Metrics()
    if not (section.rollout_is or section.rollout_rs):
        return scored.mask.to(torch.float32), metrics
    assert old_log_probs is not None and scored.rollout_log_probs is not None, "a correction without log-probabilities"
    old_log_probs, rollout_log_probs, mask = map(scored.rows, (old_log_probs, scored.rollout_log_probs, scored.mask))
    weights = mask.to(torch.float32)
    if section.rollout_is:
        ratio = ratios(old_log_probs, rollout_log_probs, mask, level=section.rollout_is)
        weights = truncated_weights(ratio, mask, threshold=section.rollout_is_threshold)
        truncated = (ratio > section.rollout_is_threshold).to(torch.float32)
        metrics["rollout_corr/rollout_is_mean"] = float(masked_mean(weights, mask))
        metrics["rollout_corr/rollout_is_ratio_fraction_high"] = float(masked_mean(truncated, mask))
    if section.rollout_rs:
        upper = section.rollout_rs_threshold or section.rollout_is_threshold
        lower = section.rollout_rs_threshold_lower
        ratio = ratios(old_log_probs, rollout_log_probs, mask, level=section.rollout_rs)
        kept = accepted(ratio, mask, lower=1.0 / upper if lower is None else lower, upper=upper)
        weights = masked(weights, kept)
        metrics["rollout_corr/rollout_rs_masked_fraction"] = 1.0 - float(masked_mean(kept.to(torch.float32), mask))
    return scored.flat(weights), metrics


def mismatch_metrics(scored: Rollouts, old_log_probs: Tensor) -> Metrics:
    """Measure how far trainer and engine differ in the probabilities of the sampled tokens, if both are known.

    `old_log_probs` are `[N]` of the trainer. A mean difference under 0.005 is usual in bfloat16; in float32 the two
    should agree to many digits. The measures under `rollout_corr` are explained in `mismatch_means`.
    """
    if scored.rollout_log_probs is None:
        return {}
    mask = scored.mask
    difference = (old_log_probs.exp() - scored.rollout_log_probs.exp()).abs()
    mean, var = masked_moments(difference, mask)
    return {
        "training/rollout_probs_diff_max": float(difference[mask].max()),
        "training/rollout_probs_diff_mean": float(mean),
        "training/rollout_probs_diff_std": float(var.sqrt()),
    } | mismatch_means(mismatch_sums(*map(scored.rows, (old_log_probs, scored.rollout_log_probs, mask))))


def _spread(name: str, x: Tensor) -> Metrics:
    x = x.double()  # the sum of finite scores may be too large for float32
    return {f"{name}/mean": float(x.mean()), f"{name}/max": float(x.max()), f"{name}/min": float(x.min())}


def _reward_metrics(scored: Scored, rewards: Tensor, advantages: Tensor) -> Metrics:
    return (
        _spread("critic/score", scored.scores)
        | _spread("critic/rewards", scored.sums(rewards))
        | _spread("critic/advantages", advantages[scored.mask])
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
        _spread("response_length", experience.num_learnt())
        | _spread("prompt_length", prompt_lengths)
        | {"response_length/clip_ratio": float(experience.truncated.float().mean())}
    )
