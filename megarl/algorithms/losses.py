"""Losses as sums over the tokens of each sequence, and the function that turns sums into a loss.

Invariant: a loss is linear in the per-sequence sums, and its denominators are totals of the *global* mini-batch. So
the losses of any split of a mini-batch over micro-batches and ranks add up to the loss of the mini-batch.

Shapes: `b` sequences of a micro-batch, `T` response tokens; `[b, T]` tensors are float32, `mask` is bool.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

import torch
from torch import Tensor

from megarl.algorithms.config import LossAggregation
from megarl.algorithms.kl import bounded_exp
from megarl.algorithms.masked import masked


@dataclass(frozen=True, kw_only=True)
class PolicyOutputs:
    """Outputs of a policy for the sampled tokens."""

    log_probs: Tensor  # [N]
    entropy: Tensor | None = None  # [N] nats, of the whole next-token distribution; None: not asked for
    kl: Tensor | None = None  # [N] nats, exact, from the reference, over the whole vocabulary; None: not asked for


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The size of a global mini-batch: the denominators of all losses and metrics of its parts."""

    num_tokens: int  # unmasked response tokens
    num_sequences: int  # sequences with an unmasked token

    @classmethod
    def of(cls, counts: Tensor) -> Self:
        """Return the totals of a mini-batch from the unmasked tokens of each of its sequences, int64 `[B]`.

        1 instead of 0, as the losses are then 0.
        """
        return cls(num_tokens=max(int(counts.sum()), 1), num_sequences=max(int((counts > 0).sum()), 1))


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Sums of one policy loss; the last three carry no gradient."""

    sums: Tensor  # [b] per-sequence sums of the token losses
    clip_frac: Tensor  # 0-dim: number of tokens with a clipped ratio or without a gradient
    clip_frac_lower: Tensor  # 0-dim: number of tokens held by the dual clip
    ppo_kl: Tensor  # 0-dim: sum of old_log_probs - log_probs

    @classmethod
    def of(
        cls,
        losses: Tensor,
        log_ratio: Tensor,
        mask: Tensor,
        *,
        clip_frac: Tensor | None = None,
        clip_frac_lower: Tensor | None = None,
    ) -> Self:
        """Sum the losses of tokens.

        Args:
            losses: `[b, T]`; what is outside the mask does not count.
            log_ratio: `[b, T]`, log_probs - old_log_probs, zero outside the mask.
            mask: `[b, T]` bool.
            clip_frac: 0-dim, the number of tokens with a clipped ratio; None: no ratio is clipped.
            clip_frac_lower: 0-dim, the number of tokens held by a dual clip; None: there is none.
        """
        none = torch.zeros((), dtype=torch.int64, device=mask.device)
        return cls(
            sums=masked(losses, mask).sum(-1),
            clip_frac=none if clip_frac is None else clip_frac,
            clip_frac_lower=none if clip_frac_lower is None else clip_frac_lower,
            ppo_kl=-log_ratio.detach().sum(),
        )


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Sums of one value loss; the count carries no gradient."""

    sums: Tensor  # [b] per-sequence sums of the token losses
    clip_frac: Tensor  # 0-dim: number of tokens whose value was clipped


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """Return the clipped surrogate with dual clip (PPO).

    With `rho = exp(log_probs - old_log_probs)`: `L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))`
    (Schulman et al. 2017, "Proximal Policy Optimization Algorithms", eq. 7; different bounds as in Yu et al. 2025,
    "DAPO", eq. 10), and, if `A < 0`, at most `-A clip_c` (Ye et al. 2020, "Mastering Complex Control in MOBA
    Games", eq. 5).

    Args:
        log_probs: `[b, T]` of the policy being trained.
        old_log_probs: `[b, T]` of the policy before this step's updates.
        advantages: `[b, T]`.
        mask: `[b, T]` bool.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.
        clip_c: bound of the ratio for negative advantages; above 1.
    """
    assert clip_c > 1.0, f"clip_c = {clip_c} would hold back tokens inside the clip range"
    log_ratio = masked(log_probs, mask) - masked(old_log_probs, mask)
    advantages = masked(advantages, mask)
    pessimistic, clipped = _clipped(bounded_exp(log_ratio), advantages, clip_low, clip_high)
    ceiling = -advantages * clip_c
    losses = torch.where(advantages < 0, torch.minimum(pessimistic, ceiling), pessimistic)
    held = (advantages < 0) & (pessimistic > ceiling)
    return PolicyLoss.of(losses, log_ratio, mask, clip_frac=clipped.sum(), clip_frac_lower=held.sum())


def gspo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Return the clipped surrogate with one ratio for each sequence (GSPO; Zheng et al. 2025, arXiv 2507.18071).

    `s = exp(mean over the sequence's tokens of (log_probs - old_log_probs))` and, on every token,
    `L_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_low, 1 + clip_high))`, in which `s_t` has the value of `s` and the
    gradient `s * grad log_probs_t`. For one advantage per sequence and `seq-mean-token-mean` this is the loss of the
    paper and its gradient. With advantages that differ by token it is the paper's GSPO-token.

    Args:
        log_probs: `[b, T]` of the policy being trained.
        old_log_probs: `[b, T]` of the policy before this step's updates.
        advantages: `[b, T]`.
        mask: `[b, T]` bool; a row without tokens has no ratio and no loss.
        clip_low: how far the ratio may fall below 1; the paper's is 3e-4.
        clip_high: how far the ratio may rise above 1; the paper's is 4e-4.
    """
    tokens = masked(log_probs, mask)
    log_ratio = tokens - masked(old_log_probs, mask)
    of_sequence = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = bounded_exp(of_sequence.detach() + (tokens - tokens.detach()))
    losses, clipped = _clipped(ratio, masked(advantages, mask), clip_low, clip_high)
    return PolicyLoss.of(losses, log_ratio, mask, clip_frac=clipped.sum())


def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Return the policy gradient with clipped importance weights (CISPO; MiniMax 2025, "MiniMax-M1", section 3.1).

    `L = -stop_gradient(clip(rho, 1 - clip_low, 1 + clip_high)) A log_probs`: a clipped token keeps its gradient, unlike
    in `ppo_clip`. The paper bounds only the upper side: a `clip_low` of 1.

    Args:
        log_probs: `[b, T]` of the policy being trained.
        old_log_probs: `[b, T]` of the policy before this step's updates.
        advantages: `[b, T]`.
        mask: `[b, T]` bool.
        clip_low: how far the weight may fall below 1.
        clip_high: how far the weight may rise above 1.
    """
    log_probs = masked(log_probs, mask)
    advantages = masked(advantages, mask)
    log_ratio = log_probs - masked(old_log_probs, mask)
    ratio = bounded_exp(log_ratio.detach())
    weights = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss.of(-weights * advantages * log_probs, log_ratio, mask, clip_frac=(weights != ratio).sum())


def sapo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, tau_pos: float, tau_neg: float
) -> PolicyLoss:
    """Return the surrogate with a soft gate instead of a clip (SAPO; Gao et al. 2025, arXiv 2511.20347).

    `L = -A 4 / tau sigmoid(tau (rho - 1))`, with `tau_pos` if `A > 0` and else `tau_neg`: the gradient is that of
    `-A rho` at a ratio of 1 and fades the faster the larger tau is. The paper weighs all sequences the same:
    `seq-mean-token-mean`.

    Args:
        log_probs: `[b, T]` of the policy being trained.
        old_log_probs: `[b, T]` of the policy before this step's updates.
        advantages: `[b, T]`.
        mask: `[b, T]` bool.
        tau_pos: how fast the gradient fades for positive advantages; the paper's is 1.
        tau_neg: how fast it fades for others; the paper's is 1.05.
    """
    log_ratio = masked(log_probs, mask) - masked(old_log_probs, mask)
    advantages = masked(advantages, mask)
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = 4.0 / tau * torch.sigmoid(tau * (bounded_exp(log_ratio) - 1.0))
    return PolicyLoss.of(-advantages * gate, log_ratio, mask)


def geo_mean(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Return the surrogate with the geometric mean of clipped ratios (GMPO; Zhao et al. 2025, arXiv 2507.20673, eq. 4).

    `held_t` is the smaller of `log rho_t` and `clip(log rho_t, -clip_low, clip_high)` if `A_t > 0`, else the larger.
    On every token `L_t = -A_t s_t`, in which `s_t` has the value of `s = exp(mean over the sequence's tokens of held)`
    and the gradient `s * grad held_t`. For one advantage per sequence and `seq-mean-token-mean` this is the loss of the
    paper and its gradient.

    Args:
        log_probs: `[b, T]` of the policy being trained.
        old_log_probs: `[b, T]` of the policy before this step's updates.
        advantages: `[b, T]`.
        mask: `[b, T]` bool; a row without tokens has no ratio and no loss.
        clip_low: how far the log of the ratio may fall below 0; the paper's is 0.4.
        clip_high: how far the log of the ratio may rise above 0; the paper's is 0.4.
    """
    log_ratio = masked(log_probs, mask) - masked(old_log_probs, mask)
    advantages = masked(advantages, mask)
    clipped = log_ratio.clamp(-clip_low, clip_high)
    held = torch.where(advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    of_sequence = held.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = bounded_exp(of_sequence.detach() + (held - held.detach()))
    return PolicyLoss.of(-advantages * ratio, log_ratio, mask, clip_frac=(held != log_ratio).sum())


def dppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence: Literal["tv", "kl"],
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """Return the policy gradient of tokens inside a trust region (DPPO; Qi et al. 2026, arXiv 2602.04879).

    `L = -stop_gradient(min(rho, clip_c)) A log_probs`. A token has no loss if its advantage moves its probability `p`
    away from the old `q`, and the divergence of the Bernoulli distributions of `p` and `q` is above `clip_high` for a
    probability that has risen, or above `clip_low` for one that has fallen. The divergence is `|p - q|` (`tv`), or
    `q log(q / p) + (1 - q) log((1 - q) / (1 - p))` (`kl`).

    Args:
        log_probs: `[b, T]` of the policy being trained.
        old_log_probs: `[b, T]` of the policy before this step's updates.
        advantages: `[b, T]`.
        mask: `[b, T]` bool.
        divergence: total variation or Kullback-Leibler.
        clip_low: largest divergence of a probability that has fallen.
        clip_high: largest divergence of a probability that has risen.
        clip_c: largest ratio that counts; the paper's is 20.
    """
    log_probs = masked(log_probs, mask)
    old_log_probs = masked(old_log_probs, mask)
    advantages = masked(advantages, mask)
    log_ratio = log_probs - old_log_probs
    ratio = bounded_exp(log_ratio.detach())
    distance = _bernoulli_divergence(log_probs.detach(), old_log_probs, divergence)
    rises = (advantages > 0) & (ratio > 1)
    falls = (advantages < 0) & (ratio < 1)
    leaves = rises & (distance > clip_high) | falls & (distance > clip_low)
    losses = (-ratio.clamp(max=clip_c) * advantages * log_probs).masked_fill(leaves, 0.0)
    held = (ratio > clip_c) & ~leaves
    return PolicyLoss.of(losses, log_ratio, mask, clip_frac=leaves.sum(), clip_frac_lower=held.sum())


def _bernoulli_divergence(log_p: Tensor, log_q: Tensor, divergence: Literal["tv", "kl"]) -> Tensor:
    """Return the divergence of the distributions `(q, 1 - q)` and `(p, 1 - p)` for each token, `[b, T]`."""
    p = log_p.exp()
    q = log_q.exp()
    if divergence == "tv":
        return (p - q).abs()
    least = torch.finfo(p.dtype).tiny
    of_others = (-torch.expm1(log_q)).clamp(min=least).log() - (-torch.expm1(log_p)).clamp(min=least).log()
    return q * (log_q - log_p) + (1.0 - q) * of_others


dppo_tv = partial(dppo, divergence="tv")
dppo_kl = partial(dppo, divergence="kl")


def gpg(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """Return the plain policy gradient `L = -A log_probs` (Williams 1992, REINFORCE; Chu et al. 2025, "GPG").

    Args:
        log_probs: `[b, T]` of the policy being trained.
        old_log_probs: `[b, T]` of the policy before this step's updates; only `ppo_kl` reads them.
        advantages: `[b, T]`.
        mask: `[b, T]` bool.
    """
    log_probs = masked(log_probs, mask)
    log_ratio = log_probs - masked(old_log_probs, mask)
    return PolicyLoss.of(-masked(advantages, mask) * log_probs, log_ratio, mask)


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    chosen: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Return the clipped surrogate without tokens that drain the entropy (Clip-Cov, Cui et al. 2025; see `covariance`).

    `L = 0` on chosen tokens, `max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))` on the others.

    Args:
        log_probs: `[b, T]` of the policy being trained.
        old_log_probs: `[b, T]` of the policy before this step's updates.
        advantages: `[b, T]`.
        mask: `[b, T]` bool.
        chosen: `[b, T]` bool: chosen from a complete mini-batch, see `training.marks`.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.
    """
    log_ratio = masked(log_probs, mask) - masked(old_log_probs, mask)
    pessimistic, clipped = _clipped(bounded_exp(log_ratio), masked(advantages, mask), clip_low, clip_high)
    chosen = chosen & mask
    return PolicyLoss.of(pessimistic.masked_fill(chosen, 0.0), log_ratio, mask, clip_frac=(clipped | chosen).sum())


def kl_cov(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, chosen: Tensor, kl_coef: float
) -> PolicyLoss:
    """Return the surrogate with a penalty on tokens that drain the entropy (KL-Cov, Cui et al. 2025; see `covariance`).

    `L = -A rho`, and on chosen tokens `L = -A rho + kl_coef |log_probs - old_log_probs|`: the divergence from the old
    policy, estimated as in the authors' code.

    Args:
        log_probs: `[b, T]` of the policy being trained.
        old_log_probs: `[b, T]` of the policy before this step's updates.
        advantages: `[b, T]`.
        mask: `[b, T]` bool.
        chosen: `[b, T]` bool: chosen from a complete mini-batch, see `training.marks`.
        kl_coef: weight of the penalty.
    """
    log_ratio = masked(log_probs, mask) - masked(old_log_probs, mask)
    losses = -masked(advantages, mask) * bounded_exp(log_ratio) + kl_coef * masked(log_ratio.abs(), chosen & mask)
    return PolicyLoss.of(losses, log_ratio, mask)


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return the larger loss of the surrogates with and without the clip, and whether the clip made it larger."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def value_clip(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_range: float) -> ValueLoss:
    """Return the clipped value loss `max((V - R)^2, (clip(V, V_old - clip_range, V_old + clip_range) - R)^2) / 2`.

    From the reference implementation of PPO (Dhariwal et al. 2017, OpenAI Baselines, `ppo2`).

    Args:
        values: `[b, T]` of the critic being trained.
        old_values: `[b, T]` of the critic before this step's updates.
        returns: `[b, T]` targets.
        mask: `[b, T]` bool.
        clip_range: how far a value may move in one step.
    """
    values = masked(values, mask)
    old_values = masked(old_values, mask)
    returns = masked(returns, mask)
    unclipped = (values - returns) ** 2
    clipped = (values.clamp(old_values - clip_range, old_values + clip_range) - returns) ** 2
    losses = 0.5 * torch.maximum(unclipped, clipped)
    return ValueLoss(sums=masked(losses, mask).sum(-1), clip_frac=(clipped > unclipped).sum())


def entropy(entropies: Tensor, mask: Tensor) -> Tensor:
    """Return sums `[b]` of the token entropies `[b, T]` (nats): the bonus to maximise (Mnih et al. 2016, A3C)."""
    return masked(entropies, mask).sum(-1)


def lm_cross_entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return sums `[b]` of `-log p(token)` over the unmasked tokens `[b, T]`: the supervised loss."""
    return -masked(log_probs, mask).sum(-1)


def bradley_terry(chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
    """Return losses `[p]` of pairs of rewards: `-log sigmoid(r_chosen - r_rejected - margin)`.

    Without margins this is the negative log-likelihood of Bradley and Terry (1952, "Rank Analysis of Incomplete Block
    Designs") as in Ouyang et al. (2022, "InstructGPT", arXiv 2203.02155, eq. 1) for one pair per prompt; with margins
    eq. 2 of Touvron et al. (2023, "Llama 2", arXiv 2307.09288).

    Args:
        chosen: `[p]` rewards of the preferred responses.
        rejected: `[p]` rewards of the others.
        margins: `[p]`, the least differences of the first reward from the second; zeros for the plain loss.
    """
    return -torch.nn.functional.logsigmoid(chosen - rejected - margins)


def reward_centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return squares `[p]` of `r_chosen + r_rejected`: pairs fix only differences, and this term brings the mean to 0.

    Eisenstein et al. (2023, "Helping or Herding?", arXiv 2312.09244, eq. 2).

    Args:
        chosen: `[p]` rewards of the preferred responses.
        rejected: `[p]` rewards of the others.
    """
    return (chosen + rejected) ** 2


def aggregate(
    sums: Tensor, counts: Tensor, *, mode: LossAggregation, num_tokens: int, num_sequences: int, horizon: int
) -> Tensor:
    """Return this part's contribution to the loss of its global mini-batch.

    - `token-mean`: every token has the same weight (DAPO);
    - `seq-mean-token-sum`: the mean over sequences of their sums;
    - `seq-mean-token-mean`: every sequence has the same weight (the GRPO paper);
    - `seq-mean-token-sum-norm`: the mean over sequences of their sums over a constant length (Dr. GRPO).

    Args:
        sums: `[b]` per-sequence sums.
        counts: `[b]` unmasked tokens per sequence; a sequence without any contributes 0.
        mode: which mean.
        num_tokens: unmasked tokens of the global mini-batch.
        num_sequences: sequences of the global mini-batch with an unmasked token.
        horizon: the constant length: the most tokens a response may have.

    Returns:
        0-dim tensor; the tensors of all parts of the mini-batch add up to its loss.
    """
    assert sums.shape == counts.shape, f"{sums.shape} sums with {counts.shape} counts"
    match mode:
        case "token-mean":
            return sums.sum() / num_tokens
        case "seq-mean-token-sum":
            return sums.sum() / num_sequences
        case "seq-mean-token-mean":
            return (sums / counts.clamp(min=1)).sum() / num_sequences
        case "seq-mean-token-sum-norm":
            return sums.sum() / (num_sequences * horizon)
