"""Advantage estimators and the token rewards they start from: pure functions of tensors.

Shapes: `B` samples, `T` response tokens; everything `[B, T]` is float32 and zero where the bool `mask` is False.
Nothing here carries a gradient, reads a configuration or talks to another process.
"""

import torch
from torch import Tensor

from megarl.algorithms.kl import KLKind, kl_penalty
from megarl.algorithms.masked import masked


def token_rewards(
    scores: Tensor, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, kl_coef: float, kl_type: KLKind
) -> tuple[Tensor, Tensor]:
    """The reward of every token: a penalty for leaving the reference, and the score on the last response token.

    `r_t = -kl_coef * KL_t + [t is the last token] * score` (Ziegler et al. 2019, "Fine-Tuning Language Models from
    Human Preferences", section 2.2; Stiennon et al. 2020 for the per-token form).

    Args:
        scores: `[B]` reward of each whole response.
        log_probs: `[B, T]` of the policy that sampled.
        ref_log_probs: `[B, T]` of the reference.
        mask: `[B, T]` bool; a row without a token gets no reward.
        kl_coef: weight of the penalty.
        kl_type: estimator of the divergence, see `kl_penalty`.

    Returns:
        Rewards `[B, T]` and the divergence `[B, T]` before its weight.
    """
    assert scores.shape == mask.shape[:1], f"{tuple(scores.shape)} scores for a mask of {tuple(mask.shape)}"
    kl = kl_penalty(masked(log_probs, mask), masked(ref_log_probs, mask), kind=kl_type)
    tokens_left = mask.flip(-1).cumsum(-1).flip(-1)
    is_last = mask & (tokens_left == 1)
    return torch.where(is_last, scores[:, None], 0.0) - kl_coef * kl, kl


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE", eq. 16).

    `delta_t = r_t + gamma * V_{t+1} - V_t` and `A_t = delta_t + gamma * lam * A_{t+1}`, where `t + 1` is the next
    *unmasked* token: masked ones are skipped, whatever stands there. After the last token `V = A = 0`.

    Args:
        rewards: `[B, T]`.
        values: `[B, T]` estimates of the state in which token `t` is chosen.
        mask: `[B, T]` bool.
        gamma: discount per token.
        lam: weight of the longer estimates; 1 is Monte Carlo, 0 is one-step TD.

    Returns:
        Advantages `[B, T]` and returns `A + V` `[B, T]`, the critic's target.
    """
    rewards, values = masked(rewards, mask), masked(values, mask)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    columns = []
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        columns.append(advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
    advantages = masked(torch.stack(columns[::-1], dim=1), mask)
    return advantages, advantages + values


def grpo(scores: Tensor, groups: Tensor, mask: Tensor, *, normalize_by_std: bool) -> Tensor:
    """Group-relative advantages (Shao et al. 2024, "DeepSeekMath", section 4.1.2).

    `A_i = (s_i - mean(s of its group)) / (std(s of its group) + 1e-6)` on every token of sample `i`; without the
    division it is Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training"). The standard deviation is the
    unbiased one. A sample alone in its group has nothing to be compared with: its advantage is 0.

    Args:
        scores: `[B]`.
        groups: `[B]` int64; equal values answer the same prompt, in any order.
        mask: `[B, T]` bool.
        normalize_by_std: divide by the group's standard deviation.

    Returns:
        Advantages `[B, T]`.
    """
    assert scores.shape == groups.shape == mask.shape[:1], f"{scores.shape}, {groups.shape}, {mask.shape}"
    _, member_of, sizes = groups.unique(return_inverse=True, return_counts=True)
    # float64: the rounding of equal scores must stay far below the 1e-6 that it is divided by.
    totals = torch.zeros(len(sizes), dtype=torch.float64, device=scores.device)
    advantages = scores.double() - (totals.index_add(0, member_of, scores.double()) / sizes)[member_of]
    if normalize_by_std:
        variances = totals.index_add(0, member_of, advantages**2) / (sizes - 1).clamp(min=1)
        advantages = advantages / (variances.sqrt()[member_of] + 1e-6)
    return masked(advantages.to(torch.float32)[:, None].expand(mask.shape), mask)


def whiten(x: Tensor, mask: Tensor, *, mean: Tensor | float, var: Tensor | float) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` on unmasked tokens, float32, from given moments.

    The moments are arguments so that they can be those of the whole batch while `x` is a part of it.
    """
    standardised = (masked(x, mask).double() - mean) / torch.as_tensor(var + 1e-8, dtype=torch.float64).sqrt()
    return masked(standardised.to(torch.float32), mask)
