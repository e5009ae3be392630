"""Turns scored rollouts into experience: token rewards, advantages, returns, and their metrics.

Invariant: numbers of a token are computed on the ranks that have its sample. Numbers of a group come from all its
samples, and moments from exact sums over all samples, so no result depends on how the samples are spread.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms import advantages as estimators
from megarl.algorithms.advantages import token_rewards, whiten
from megarl.algorithms.calls import arguments_of
from megarl.algorithms.config import AlgorithmSection, OverlongBufferSection, RolloutCorrectionSection
from megarl.algorithms.correction import accepted, mismatch_means, mismatch_sums, ratios, truncated_weights
from megarl.algorithms.kl import token_divergence
from megarl.algorithms.masked import masked
from megarl.algorithms.shaping import overlong_penalty
from megarl.batch import Experience, Rewarded
from megarl.columns import flat, in_rows
from megarl.distributed.sharded import Sharded
from megarl.training.custom import CustomEstimator
from megarl.training.interfaces import Metrics
from megarl.training.statistics import (
    Spread,
    Summary,
    joined,
    mean,
    mean_of_samples,
    moments_of_samples,
    on_learnt,
    spread,
    spreads,
    summaries,
    summary_of_samples,
)

Estimator = Callable[..., Tensor | tuple[Tensor, Tensor]]


def estimate(
    samples: Sharded[Rewarded],
    old_log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
    values: Tensor | None,
    baselines: Tensor | None = None,
    *,
    algorithm: AlgorithmSection,
    kl_coef: float | None,
    exact_kl: Tensor | None = None,
    custom: CustomEstimator | None = None,
) -> tuple[Sharded[Experience], Metrics]:
    """Compute advantages and returns of a full batch, with metrics. Collective.

    Args:
        samples: `B` samples; this rank has `n` of their tokens.
        old_log_probs: `[n]` float32 of the actor that sampled; None: not known yet, so that neither a KL in the
            reward nor a correction can be computed.
        ref_log_probs: `[n]` of the reference; None if no KL is estimated from them.
        values: `[n]` of the critic; None without one. GAE needs it.
        baselines: `[B]` rewards of the greedy responses; None if none were drawn. ReMax needs them.
        algorithm: the estimator and its parameters.
        kl_coef: weight of the KL penalty in the reward; None keeps the KL out of the reward.
        exact_kl: `[n]` of the actor from the reference; the exact kinds of `kl_penalty` need it.
        custom: the user's estimator; `adv_estimator=custom` needs it.
    """
    share = samples.share
    kl = None
    if kl_coef is not None:
        bound = algorithm.kl_penalty_k3_bound
        kl = token_divergence(algorithm.kl_penalty, exact_kl, old_log_probs, ref_log_probs, share.mask, k3_bound=bound)
    scores = response_rewards(share, algorithm.overlong_buffer)
    rewards = None  # of tokens
    if kl is None and share.turn_rewards is None:
        of_share = scores.where(share.num_learnt() > 0, 0.0)
    else:
        rewards = _token_rewards(share, scores, kl, kl_coef or 0.0)
        of_share = share.sums(rewards)
    of_samples = [share.num_learnt(), share.scores, of_share]
    if kl is not None:  # of a sample the mean of its tokens: long responses do not weigh more in the KL controller
        of_samples.append(share.sums(kl) / share.num_learnt().clamp(min=1))
    lengths, given, totals, *kls = spreads(samples, of_samples)
    if algorithm.estimator.compares and not custom:
        advantages, of_advantages = _compared(samples, of_share, algorithm)
        of_critic: list[Summary] = []
        returns = _constant(0.0, advantages)
    else:
        rewards = _token_rewards(share, scores, None, 0.0) if rewards is None else rewards
        advantages, returns, found = _advantages(samples, rewards, of_share, values, baselines, algorithm, custom)
        of_advantages, *of_critic = found
    weights, weight_metrics = _correction(samples, old_log_probs, algorithm.rollout_correction)
    before = share.rollout_log_probs if algorithm.rollout_correction.bypass_mode else old_log_probs
    experience = samples.with_share(
        share.extend(
            Experience,
            old_log_probs=before,
            ref_log_probs=ref_log_probs,
            values=_constant(0.0, advantages) if values is None else values,
            advantages=advantages,
            weights=weights,
            returns=returns,
        )
    )
    metrics = given.metrics("critic/score") | totals.metrics("critic/rewards")
    metrics |= of_advantages.metrics("critic/advantages") | _length_metrics(samples, lengths) | weight_metrics
    if baselines is not None:
        metrics |= spread("critic/baselines", baselines)
    if of_critic:
        metrics |= _critic_metrics(*of_critic)
    if kl_coef is not None:
        metrics |= {"actor/reward_kl_penalty": kls[0].mean, "actor/reward_kl_penalty_coeff": kl_coef}
    if algorithm.mask_truncated_completions:
        experience = experience.without_responses(samples.index.truncated)
    return experience, metrics


def _constant(number: float, column: Tensor) -> Tensor:
    """Return a column `[n]` float32 of one number, as long as `column`, which takes the memory of that number alone."""
    return torch.tensor(number).expand(len(column))


def _token_rewards(share: Rewarded, scores: Tensor, kl: Tensor | None, kl_coef: float) -> Tensor:
    """Return the reward of each token, `[n]`: from turns, or else from scores `[b]`, less the penalty."""
    if share.turn_rewards is None:
        return token_rewards(scores, kl, share.mask, share.num_tokens, kl_coef=kl_coef)
    return on_learnt(share, share.turn_rewards if kl is None else share.turn_rewards - kl_coef * kl)


def response_rewards(scored: Rewarded, section: OverlongBufferSection) -> Tensor:
    """Return the scores, less the penalty for long responses if it is enabled: `[B]` float32."""
    if not section.enable:
        return scored.scores
    return scored.scores + overlong_penalty(
        scored.num_learnt(), max_length=section.max_resp_len, buffer=section.len, factor=section.penalty_factor
    )


def _compared(samples: Sharded[Rewarded], totals: Tensor, algorithm: AlgorithmSection) -> tuple[Tensor, Summary]:
    """Return the `[n]` advantages of an estimator that compares samples, and their statistics.

    `totals` are `[b]` rewards. All tokens of a sample have the same advantage. If the samples of a group lie together
    on the same ranks, these compare them, unless the estimator asks for the complete batch.
    """
    if algorithm.estimator.of_batch or not samples.index.runs.keep_groups:
        index = samples.index
        scores = samples.gather(totals)
        advantages = _per_sample(scores, index.groups, index.num_learnt, algorithm)[samples.mine]
    else:
        advantages = _per_sample(totals, samples.share.groups, samples.share.num_learnt(), algorithm)
    summary = summary_of_samples(samples, advantages)
    if algorithm.estimator.whitens:
        mask = torch.ones(len(advantages), 1, dtype=torch.bool)
        advantages = whiten(advantages[:, None], mask, mean=summary.mean, var=summary.variance)[:, 0]
        summary = summary_of_samples(samples, advantages)
    return on_learnt(samples.share, samples.share.on_tokens(advantages)), summary


def _per_sample(totals: Tensor, groups: Tensor, lengths: Tensor, algorithm: AlgorithmSection) -> Tensor:
    """Return the advantage of each of `b` samples, `[b]` float32, from their rewards, groups and lengths."""
    function = getattr(estimators, algorithm.adv_estimator)
    keys = {key: getattr(algorithm, key) for key in algorithm.estimator.reads}
    numbers = {"scores": totals.to(torch.float32), "groups": groups, "lengths": lengths}
    mask = torch.ones(len(totals), 1, dtype=torch.bool)
    found: Tensor = function(**arguments_of(function, numbers | {"mask": mask}), **keys)
    return found[:, 0]


def _advantages(
    samples: Sharded[Rewarded],
    rewards: Tensor,
    totals: Tensor,
    values: Tensor | None,
    baselines: Tensor | None,
    algorithm: AlgorithmSection,
    custom: CustomEstimator | None,
) -> tuple[Tensor, Tensor, list[Summary]]:
    """Return what an estimator makes of tokens: the `[n]` advantages, returns, and statistics.

    `rewards` are `[n]` of this rank's tokens, and `totals` `[b]` of its samples. Returns are zero without a critic. The
    statistics are those of the advantages, and, with a critic, of returns, values and errors.
    """
    share = samples.share
    if custom:
        advantages, *more = _custom_advantages(samples, rewards, totals, values, baselines, custom)
    else:
        function = getattr(estimators, algorithm.adv_estimator)
        keys = {key: getattr(algorithm, key) for key in algorithm.estimator.reads}
        columns = {"token_rewards": rewards, "mask": share.mask} | ({} if values is None else {"values": values})
        greedy = {} if baselines is None else {"baselines": baselines[samples.mine]}
        advantages, *more = _row_by_row(partial(function, **keys), share, columns, **greedy)
    returns = more[0] if more else _constant(0.0, rewards)
    if algorithm.estimator.whitens:
        [raw] = summaries(samples, advantages)
        for _, (part, mask) in share.blocks(advantages, share.mask):
            part.copy_(whiten(part, mask, mean=raw.mean, var=raw.variance))
    if values is None:
        return advantages, returns, summaries(samples, advantages)
    found = summaries(samples, advantages, returns, values, of=lambda a, r, v: (a, r, v, r - v))
    return advantages, returns, found


def _row_by_row(
    estimator: Estimator,
    share: Rewarded,
    columns: Mapping[str, Tensor],
    **of_samples: Tensor,
) -> list[Tensor]:
    """Return the columns `[n]` that the estimator makes of each sample alone, from `columns` and numbers `[b]`."""
    columns = arguments_of(estimator, columns)
    of_samples = arguments_of(estimator, of_samples)
    made: list[Tensor] = []
    end = 0
    for block, parts in share.blocks(*columns.values()):
        counts = share.num_tokens[block]
        rows = (in_rows(part, counts) for part in parts)
        numbers = {name: column[block] for name, column in of_samples.items()}
        found = estimator(**dict(zip(columns, rows, strict=True)), **numbers)
        laid_out = found if isinstance(found, tuple) else (found,)
        made = made or [torch.empty(len(share.mask)) for _ in laid_out]
        start = end
        end = end + len(parts[0])
        for column, each in zip(made, laid_out, strict=True):
            flat(each, counts, out=column[start:end])
    return made


def _custom_advantages(
    samples: Sharded[Rewarded],
    rewards: Tensor,
    totals: Tensor,
    values: Tensor | None,
    baselines: Tensor | None,
    custom: CustomEstimator,
) -> list[Tensor]:
    """Return what the user's estimator makes of the complete batch, which every rank therefore holds for a moment."""
    index = samples.index

    def rows(column: Tensor) -> Tensor:
        return in_rows(samples.gather_tokens(column).to(column.dtype), index.num_tokens)

    scores = samples.gather(totals).to(torch.float32)
    tensors = {"token_rewards": rows(rewards), "scores": scores, "groups": index.groups}
    tensors["mask"] = rows(samples.share.mask)
    if values is not None:
        tensors["values"] = rows(values)
    if baselines is not None:
        tensors["baselines"] = baselines
    return [samples.share_of(flat(found, index.num_tokens)) for found in custom(tensors)]


def _correction(
    samples: Sharded[Rewarded], old_log_probs: Tensor | None, section: RolloutCorrectionSection
) -> tuple[Tensor, Metrics]:
    """Return `[n]` factors of the advantages that correct for the engine's probabilities, with metrics."""
    share = samples.share
    metrics = Metrics()
    if not section.rollout_is and not section.rollout_rs:
        factors = _constant(1.0, share.mask) if share.is_all_learnt else share.mask.to(torch.float32)
        return factors, metrics
    assert old_log_probs is not None and share.rollout_log_probs is not None, "a correction without log-probabilities"
    mask = share.mask
    columns = {"log_probs": old_log_probs, "rollout_log_probs": share.rollout_log_probs, "mask": mask}
    weights = mask.to(torch.float32)
    if section.rollout_is:
        [ratio] = _row_by_row(partial(ratios, level=section.rollout_is), share, columns)
        weights = truncated_weights(ratio, mask, threshold=section.largest_weight)
        if section.rollout_is_threshold_lower is not None:
            smallest = section.rollout_is_threshold_lower
            largest = section.largest_weight
            weights = masked(weights, accepted(ratio, mask, lower=smallest, upper=largest))
        truncated = (ratio > section.largest_weight).to(torch.float32)
        metrics["rollout_corr/rollout_is_mean"] = mean(samples, weights)
        if section.rollout_is_batch_normalize:
            average = mean if section.rollout_is == "token" else mean_of_samples
            weights = weights / (average(samples, weights) or 1.0)
        metrics["rollout_corr/rollout_is_ratio_fraction_high"] = mean(samples, truncated)
    if section.rollout_rs:
        upper = section.largest_ratio
        lower = section.rollout_rs_threshold_lower
        if lower is None:
            lower = 1.0 / upper
        [ratio] = _row_by_row(partial(ratios, level=section.rollout_rs), share, columns)
        kept = accepted(ratio, mask, lower=lower, upper=upper)
        weights = masked(weights, kept)
        metrics["rollout_corr/rollout_rs_masked_fraction"] = 1.0 - mean(samples, kept)
    return weights, metrics


def mismatch_metrics(samples: Sharded[Rewarded], old_log_probs: Tensor) -> Metrics:
    """Measure how far trainer and engine differ in the probabilities of the sampled tokens, if both are known.

    `old_log_probs` are `[n]` of the trainer. A mean difference under 0.005 is usual in bfloat16; in float32 the two
    should agree to many digits. The measures under `rollout_corr` are explained in `mismatch_means`.
    """
    share = samples.share
    if share.rollout_log_probs is None:
        return {}
    counts = list[Tensor]()
    moments = list[Tensor]()
    sums = defaultdict[str, list[Tensor]](list)
    for of_block, (mine, drawn) in share.learnt_blocks(old_log_probs, share.rollout_log_probs):
        counts.append(of_block)
        moments.append(moments_of_samples([mine.exp().sub_(drawn.exp()).abs_()], of_block))
        for name, of_samples in mismatch_sums(mine, drawn, of_block).items():
            sums[name].append(of_samples)
    [summary] = joined(samples, torch.cat(counts), torch.cat(moments))
    return {
        "training/rollout_probs_diff_max": summary.largest,
        "training/rollout_probs_diff_mean": summary.mean,
        "training/rollout_probs_diff_std": math.sqrt(summary.variance),
    } | mismatch_means({name: torch.cat(parts) for name, parts in sums.items()}, added=samples.sum)


def _critic_metrics(returns: Summary, values: Summary, errors: Summary) -> Metrics:
    return (
        returns.metrics("critic/returns")
        | values.metrics("critic/values")
        | {"critic/vf_explained_var": 1.0 - errors.variance / (returns.variance + 1e-5)}
    )


def _length_metrics(samples: Sharded[Rewarded], lengths: Spread) -> Metrics:
    return (
        lengths.metrics("response_length")
        | spread("prompt_length", samples.share.prompt_lengths())
        | {"response_length/clip_ratio": np.count_nonzero(samples.index.truncated.numpy()) / len(samples)}
    )
