"""Losses as sums over the tokens of each sequence, and the one place that turns sums into a loss.

Invariant: a loss is linear in the per-sequence sums, and its denominators are totals of the *global* mini-batch. So
the losses of any split of a mini-batch over micro-batches and ranks add up to the loss of the whole.

Shapes: `b` sequences of a micro-batch, `T` response tokens; `[b, T]` tensors are float32, `mask` is bool.
"""

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from megarl.algorithms.kl import bounded_exp
from megarl.algorithms.masked import masked

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, kw_only=True)
class PolicyOutputs:
    """What a policy says about the sampled tokens."""

    log_probs: Tensor  # [b, T]
    entropy: Tensor  # [b, T] nats, of the whole next-token distribution


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The size of a global mini-batch: the denominators of every loss and metric of its parts."""

    num_tokens: int  # unmasked response tokens
    num_sequences: int

    @classmethod
    def of(cls, mask: Tensor) -> Self:
        """The totals of a mini-batch from its whole mask `[B, T]`."""
        return cls(num_tokens=int(mask.sum()), num_sequences=mask.shape[0])


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Sums of one policy loss; the last three carry no gradient."""

    sums: Tensor  # [b] per-sequence sums of the token losses
    clip_frac: Tensor  # 0-dim: number of tokens whose ratio was clipped
    clip_frac_lower: Tensor  # 0-dim: number of tokens held by the dual clip
    ppo_kl: Tensor  # 0-dim: sum of old_log_probs - log_probs


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
    """The clipped surrogate with dual clip.

    With `rho = exp(log_probs - old_log_probs)`: `L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))`
    (Schulman et al. 2017, "Proximal Policy Optimization Algorithms", eq. 7; different bounds as in Yu et al. 2025,
    "DAPO", eq. 10), and where `A < 0` no more than `-A clip_c` (Ye et al. 2020, "Mastering Complex Control in MOBA
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
    ratio = bounded_exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    pessimistic = torch.maximum(unclipped, clipped)
    ceiling = -advantages * clip_c
    losses = torch.where(advantages < 0, torch.minimum(pessimistic, ceiling), pessimistic)
    return PolicyLoss(
        sums=masked(losses, mask).sum(-1),
        clip_frac=(clipped > unclipped).sum(),
        clip_frac_lower=((advantages < 0) & (pessimistic > ceiling)).sum(),
        ppo_kl=-log_ratio.detach().sum(),
    )


def value_clip(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_range: float) -> ValueLoss:
    """`max((V - R)^2, (clip(V, V_old - clip_range, V_old + clip_range) - R)^2) / 2`, the clipped value loss.

    From the reference implementation of PPO (Dhariwal et al. 2017, OpenAI Baselines, `ppo2`).

    Args:
        values: `[b, T]` of the critic being trained.
        old_values: `[b, T]` of the critic before this step's updates.
        returns: `[b, T]` targets.
        mask: `[b, T]` bool.
        clip_range: how far a value may move in one step.
    """
    values, old_values, returns = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    unclipped = (values - returns) ** 2
    clipped = (values.clamp(old_values - clip_range, old_values + clip_range) - returns) ** 2
    losses = 0.5 * torch.maximum(unclipped, clipped)
    return ValueLoss(sums=masked(losses, mask).sum(-1), clip_frac=(clipped > unclipped).sum())


def entropy(entropies: Tensor, mask: Tensor) -> Tensor:
    """Sums `[b]` of the token entropies `[b, T]` (nats): the bonus to be maximised (Mnih et al. 2016, A3C)."""
    return masked(entropies, mask).sum(-1)


def lm_cross_entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Sums `[b]` of `-log p(token)` over the unmasked tokens `[b, T]`: the supervised loss."""
    return -masked(log_probs, mask).sum(-1)


def aggregate(
    sums: Tensor, counts: Tensor, *, mode: LossAggMode, num_tokens: int, num_sequences: int, horizon: int
) -> Tensor:
    """This part's contribution to the loss of its global mini-batch.

    - `token-mean`: every token weighs the same (DAPO);
    - `seq-mean-token-sum`: every sequence's sum;
    - `seq-mean-token-mean`: every sequence weighs the same (the GRPO paper);
    - `seq-mean-token-sum-norm`: every sequence's sum over a constant length (Dr. GRPO).

    Args:
        sums: `[b]` per-sequence sums.
        counts: `[b]` unmasked tokens per sequence; a sequence without any contributes 0.
        mode: which mean.
        num_tokens: unmasked tokens of the global mini-batch.
        num_sequences: sequences of the global mini-batch.
        horizon: the constant length: the most tokens a response may have.

    Returns:
        0-dim tensor; over all parts of the mini-batch these add up to its loss.
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
