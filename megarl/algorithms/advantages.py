"""Advantage estimators and the token rewards they start from: pure functions of tensors.

Shapes: `B` samples, `T` response tokens; every `[B, T]` tensor is float32 and zero under the bool `mask`.
`groups` is `[B]` int64, never negative: equal values mark responses to the same prompt, in any order, and a group is
always complete.
Nothing here carries a gradient, reads a configuration or communicates.

If a paper standardises over the batch (`gae` as PPO uses it, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`),
the estimator leaves that to `whiten`, which takes the moments of the complete batch.
"""

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.masked import masked
from megarl.columns import reduced


def token_rewards(scores: Tensor, kl: Tensor | None, mask: Tensor, num_tokens: Tensor, *, kl_coef: float) -> Tensor:
    """Return the reward of every token: a penalty for leaving the reference, and the score on the last response token.

    `r_t = -kl_coef * KL_t + [t is the last token] * score` (Ziegler et al. 2019, "Fine-Tuning Language Models from
    Human Preferences", section 2.2; Stiennon et al. 2020 for the per-token form).

    Args:
        scores: `[B]` reward of each response.
        kl: `[N]` divergence from the reference of the policy that sampled: estimates, or exact; None: no penalty.
        mask: `[N]` bool; a response without a token gets no reward.
        num_tokens: `[B]` int64, the tokens of each response, which lie end to end in `kl` and `mask`.
        kl_coef: weight of the penalty.

    Returns:
        Rewards `[N]`.
    """
    assert scores.shape == num_tokens.shape, f"{tuple(scores.shape)} scores for {len(num_tokens)} responses"
    rewards = torch.zeros(mask.shape) if kl is None else 0.0 - kl_coef * masked(kl, mask)
    ends = num_tokens.cumsum(0)
    after_last = ends if mask.numpy().all() else reduced(np.maximum, torch.arange(1, len(mask) + 1) * mask, num_tokens)
    has_tokens = after_last > ends - num_tokens
    rewards[after_last[has_tokens] - 1] += scores[has_tokens]
    return rewards


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Estimate advantages by GAE (Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE", eq. 16).

    `delta_t = r_t + gamma * V_{t+1} - V_t` and `A_t = delta_t + gamma * lam * A_{t+1}`, and `t + 1` is the next
    *unmasked* token: masked tokens are skipped, whatever their values. After the last token `V = A = 0`.

    Args:
        token_rewards: `[B, T]`.
        values: `[B, T]` estimates of the state before token `t`.
        mask: `[B, T]` bool.
        gamma: discount per token.
        lam: weight of the longer estimates; 1 is Monte Carlo, 0 is one-step TD.

    Returns:
        Advantages `[B, T]` and returns `A + V` `[B, T]`, the critic's target.
    """
    unmasked = _Unmasked(mask)
    estimates = unmasked.gather(values)
    errors = unmasked.gather(token_rewards) - estimates
    errors[:, :-1] += gamma * estimates[:, 1:]
    advantages = _discounted_sums(errors, gamma * lam)
    return unmasked.scatter(advantages), unmasked.scatter(advantages + estimates)


def grpo(scores: Tensor, groups: Tensor, mask: Tensor, *, norm_adv_by_std_in_grpo: bool) -> Tensor:
    """Compare each sample with its group (Shao et al. 2024, "DeepSeekMath", section 4.1.2).

    `A_i = (s_i - mean(s of its group)) / (std(s of its group) + 1e-6)` on every token of sample `i`; without the
    division it is Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training"). The standard
    deviation is the unbiased one. A sample alone in its group has the advantage 0.

    Args:
        scores: `[B]`.
        groups: `[B]` int64.
        mask: `[B, T]` bool.
        norm_adv_by_std_in_grpo: divide by the group's standard deviation.

    Returns:
        Advantages `[B, T]`.
    """
    group = _Groups(groups)
    advantages = scores.double() - group.mean(scores.double())
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (group.std(scores.double()) + 1e-6)
    return _on_every_token(advantages, mask)


def rloo(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Compare each sample with the others of its group, leaving it out of the mean.

    Kool et al. 2019; for language models: Ahmadian et al. 2024, "Back to Basics".

    `A_i = s_i - mean(s of the others of its group) = n / (n - 1) * (s_i - mean(s of its group))` for a group of `n`, on
    every token of sample `i`. A sample alone in its group has the advantage 0.

    Args:
        scores: `[B]`.
        groups: `[B]` int64.
        mask: `[B, T]` bool.

    Returns:
        Advantages `[B, T]`.
    """
    group = _Groups(groups)
    advantages = (scores.double() - group.mean(scores.double())) * group.sizes / (group.sizes - 1).clamp(min=1)
    return _on_every_token(advantages, mask)


def reinforce_plus_plus(token_rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Sum discounted rewards to go (Hu et al. 2025, "REINFORCE++"), to be whitened over the whole batch.

    `A_t = r_t + gamma * A_{t+1}`, and `t + 1` is the next *unmasked* token. With the result of the function
    `token_rewards` and `gamma = 1` this is the paper's `score - kl_coef * (sum of the KL from t on)`.

    Args:
        token_rewards: `[B, T]`.
        mask: `[B, T]` bool.
        gamma: discount per token.

    Returns:
        Advantages `[B, T]`, not whitened.
    """
    return _rewards_to_go(token_rewards, mask, gamma=gamma)


def reinforce_plus_plus_baseline(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Subtract the mean of the group (REINFORCE++ with a baseline, Hu et al. 2025), to be whitened over the batch.

    `A_i = s_i - mean(s of its group)` on every token of sample `i`. The spread is that of the batch, because a few
    equal responses make the spread of a group arbitrarily small.

    Args:
        scores: `[B]`.
        groups: `[B]` int64.
        mask: `[B, T]` bool.

    Returns:
        Advantages `[B, T]`, not whitened.
    """
    return grpo(scores, groups, mask, norm_adv_by_std_in_grpo=False)


def remax(token_rewards: Tensor, baselines: Tensor, mask: Tensor) -> Tensor:
    """Subtract the score of the greedy response from rewards to go (Li et al. 2024, "ReMax", algorithm 1).

    `A_t = (sum of r_u over u >= t) - b_i`, and `b_i` is the score of the greedy response to the prompt of sample `i`.
    Without a penalty in the rewards the advantage is `s_i - b_i` on every token. With a penalty, a token is charged
    only for the divergence of itself and of later tokens, because it does not influence earlier tokens.

    Args:
        token_rewards: `[B, T]`.
        baselines: `[B]`; the samples of a prompt share one value.
        mask: `[B, T]` bool.

    Returns:
        Advantages `[B, T]`.
    """
    assert mask.shape[:1] == baselines.shape, f"{tuple(baselines.shape)} baselines for a mask of {tuple(mask.shape)}"
    return masked(_rewards_to_go(token_rewards, mask, gamma=1.0) - baselines[:, None], mask)


def gpg(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Return the advantages of the group policy gradient (Chu et al. 2025, "GPG", arXiv 2504.02546, with `F_norm = 1`).

    `A_i = B / (B - M) * (s_i - mean(s of its group))` on every token of sample `i`, if `M` of the `B` samples are in
    groups of equal scores. Such a group has no gradient; the factor keeps it from shrinking the mean gradient of the
    other groups. If all groups have equal scores, every advantage is 0.

    Args:
        scores: `[B]`.
        groups: `[B]` int64.
        mask: `[B, T]` bool.

    Returns:
        Advantages `[B, T]`.
    """
    group = _Groups(groups)
    scores = scores.double()
    num_telling = int(group.differ(scores).sum())
    return _on_every_token((scores - group.mean(scores)) * len(scores) / max(num_telling, 1), mask)


def opo(scores: Tensor, groups: Tensor, mask: Tensor, *, lengths: Tensor | None = None) -> Tensor:
    """Subtract the optimal baseline of the group (Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline").

    `A_i = s_i - (sum of l_j * s_j) / (sum of l_j)` over the samples `j` of its group and their lengths `l_j`, on every
    token of sample `i`: the baseline of least variance if the squared gradient of a response grows with its length.

    Args:
        scores: `[B]`.
        groups: `[B]` int64.
        mask: `[B, T]` bool.
        lengths: `[B]`; None: the rows of the mask give them.

    Returns:
        Advantages `[B, T]`.
    """
    group = _Groups(groups)
    lengths = (mask.sum(-1) if lengths is None else lengths).double()
    baselines = group.sum(lengths * scores.double()) / group.sum(lengths).clamp(min=1.0)
    return _on_every_token(scores.double() - baselines, mask)


def grpo_passk(scores: Tensor, groups: Tensor, mask: Tensor, *, norm_adv_by_std_in_grpo: bool) -> Tensor:
    """Reward only the best sample of a group, for pass@k.

    Tang et al. 2025, "Optimizing Language Models for Inference Time Objectives".

    `A = s_best - s_second` on every token of the best sample of a group, 0 on all others: the leave-one-out gradient of
    the expected maximum of the group, which is pass@k for scores of 0 and 1 in groups of k. Divided by the group's
    `std + 1e-6` if asked. Equal best samples, and a sample alone in its group, gain nothing.

    Args:
        scores: `[B]`.
        groups: `[B]` int64.
        mask: `[B, T]` bool.
        norm_adv_by_std_in_grpo: divide by the group's standard deviation.

    Returns:
        Advantages `[B, T]`.
    """
    group = _Groups(groups)
    scores = scores.double()
    ranked = scores.argsort(stable=True)
    ranked = ranked[group.member_of[ranked].argsort(stable=True)]  # group by group, the best of each at its end
    ends = group.counts.cumsum(0) - 1
    best = ranked[ends]
    second = ranked[(ends - 1).clamp(min=0)]
    gaps = (scores[best] - scores[second]).where(group.counts > 1, 0.0)
    if norm_adv_by_std_in_grpo:
        gaps = gaps / (group.std(scores)[best] + 1e-6)
    return _on_every_token(torch.zeros_like(scores).index_copy(0, best, gaps), mask)


def none(mask: Tensor) -> Tensor:
    """Return advantages of 0, `[B, T]` float32: only other terms of the loss teach anything."""
    return torch.zeros(mask.shape)


def whiten(x: Tensor, mask: Tensor, *, mean: Tensor | float, var: Tensor | float) -> Tensor:
    """Return `(x - mean) / sqrt(var + 1e-8)` on unmasked tokens, in float32, from given moments.

    The moments are arguments so that `x` may be a part of the batch and the moments those of the complete batch, from
    `masked_moments` or from sums, sums of squares and counts of all ranks.
    """
    divisor = torch.as_tensor(var + 1e-8, dtype=torch.float64).sqrt()
    standardised = x.to(torch.float64, copy=True).sub_(mean).div_(divisor).to(torch.float32)
    return standardised if mask.numpy().all() else masked(standardised, mask)


class _Groups:
    """Sums and moments over the samples of a group, repeated for each of its samples.

    They are float64: the rounding of equal scores must stay far below the 1e-6 that is added to the divisor.
    """

    def __init__(self, groups: Tensor) -> None:
        _, self.member_of, self.counts = groups.unique(return_inverse=True, return_counts=True)
        self.sizes = self.counts[self.member_of]  # [B]: of the group of each sample

    def sum(self, x: Tensor) -> Tensor:
        assert x.shape == self.member_of.shape, f"{tuple(x.shape)} numbers for {len(self.member_of)} samples"
        totals = torch.zeros(len(self.counts), dtype=torch.float64, device=x.device)
        return totals.index_add(0, self.member_of, x)[self.member_of]

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.sizes

    def differ(self, x: Tensor) -> Tensor:
        """Return whether the values of the group differ, `[B]` bool."""
        any_member = torch.zeros(len(self.counts), dtype=x.dtype, device=x.device).scatter(0, self.member_of, x)
        return self.sum((x != any_member[self.member_of]).double()) > 0

    def std(self, x: Tensor) -> Tensor:
        """Return the unbiased standard deviation; 0 for a sample alone in its group."""
        return (self.sum((x - self.mean(x)) ** 2) / (self.sizes - 1).clamp(min=1)).sqrt()


class _Unmasked:
    """The unmasked tokens of each sample, moved to its beginning."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.moved: tuple[Tensor, Tensor] | None = None  # None: they are at the beginning already
        marks = mask.numpy()
        self.is_whole = marks.all()
        if (marks[:, 1:] > marks[:, :-1]).any():
            rows = mask.nonzero()[:, 0]
            places = mask.cumsum(-1)[mask] - 1
            self.moved = (rows, places)

    def gather(self, x: Tensor) -> Tensor:
        """Return the values of the unmasked tokens at the beginning of each row, followed by zeros."""
        if self.moved is None:
            return x if self.is_whole else masked(x, self.mask)
        return torch.zeros_like(x).index_put(self.moved, x[self.mask])

    def scatter(self, gathered: Tensor) -> Tensor:
        """Return gathered values, which are zero behind those of unmasked tokens, at their own places."""
        if self.moved is None:
            return gathered
        return torch.zeros_like(gathered).masked_scatter(self.mask, gathered[self.moved])


def _discounted_sums(x: Tensor, discount: float) -> Tensor:
    """Return `y_t = x_t + discount * y_{t+1}` along the last dimension.

    A row's result does not depend on the rows and the padding beside it: the sums of 1, 2, 4, ... terms are added
    elementwise. Without a discount, the terms are added one after the other.
    """
    if discount == 1.0:
        return x.flip(-1).cumsum(-1).flip(-1)
    num_terms = 1
    while num_terms < x.shape[-1]:
        sums = torch.empty_like(x)
        sums[..., -num_terms:] = x[..., -num_terms:]
        torch.add(x[..., :-num_terms], discount**num_terms * x[..., num_terms:], out=sums[..., :-num_terms])
        x = sums
        num_terms *= 2
    return x


def _rewards_to_go(token_rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Return `[B, T]`: the discounted sum of the rewards of this and all later unmasked tokens."""
    advantages, _ = gae(token_rewards, torch.zeros_like(token_rewards), mask, gamma=gamma, lam=1.0)
    return advantages


def _on_every_token(per_sample: Tensor, mask: Tensor) -> Tensor:
    assert per_sample.shape == mask.shape[:1], f"{tuple(per_sample.shape)} samples, a mask of {tuple(mask.shape)}"
    return masked(per_sample.to(torch.float32)[:, None].expand(mask.shape), mask)
