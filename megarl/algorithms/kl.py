"""Divergence from the reference policy, estimated from sampled tokens or exact, and the controllers of its weight."""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from megarl.algorithms.config import SampledKL

LOG_RATIO_LIMIT = 20.0


def bounded_exp(x: Tensor) -> Tensor:
    """`exp(x)` with `x` held within +-20: far outside any clip range, and still finite in float32.

    An infinite ratio would turn into NaN in the backward pass, also where the loss ignores it (0 * inf).
    """
    return torch.exp(x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, *, kind: SampledKL, k3_bound: float | None = None) -> Tensor:
    """Per-token estimate of `KL(policy || reference)` from tokens that the policy sampled.

    With `d = log_probs - ref_log_probs` (Schulman 2020, "Approximating KL Divergence"):

    - `kl`, `k1`: `d`, unbiased, of high variance, may be negative;
    - `abs`: `|d|`;
    - `mse`, `k2`: `d^2 / 2`, biased, of low variance;
    - `low_var_kl`, `k3`: `exp(-d) + d - 1`, unbiased and never negative.

    The exponential of `k3` lets one token that the reference finds far likelier outweigh all others. `k3_bound` cuts
    the estimate: a token above the bound counts as the bound and has no gradient.

    What is unbiased as a number, in the reward, need not be so as a loss (Tang & Munos 2025, "On a few pitfalls in KL
    divergence gradient estimation for RL"): with tokens drawn from the policy itself, the gradient of `kl` is 0 in the
    mean, so that as a loss it only adds noise; that of `mse` is the gradient of the divergence; that of `low_var_kl` is
    the gradient of `KL(reference || policy)`, which is close to it near the reference; that of `abs` is `sign(d)` times
    the score, which stays as large near the reference.

    Args:
        log_probs: float tensor of any shape.
        ref_log_probs: the same shape.
        kind: estimator.
        k3_bound: the largest estimate of `k3` in nats; None for no bound. The other estimators ignore it.

    Returns:
        The estimates, same shape; differentiable.
    """
    assert log_probs.shape == ref_log_probs.shape, f"{log_probs.shape} against {ref_log_probs.shape}"
    difference = log_probs - ref_log_probs
    match kind:
        case "kl" | "k1":
            return difference
        case "abs":
            return difference.abs()
        case "mse" | "k2":
            return 0.5 * difference**2
        case "low_var_kl" | "k3":
            estimate = bounded_exp(-difference) + difference - 1.0
            return estimate if k3_bound is None else estimate.clamp(max=k3_bound)


def full_kl(log_p: Tensor, ref_log_p: Tensor) -> Tensor:
    """The exact `KL(policy || reference) = sum over the vocabulary of p (log p - log q)` of each token.

    Args:
        log_p: `[..., V]` log-probabilities of the policy over the whole vocabulary.
        ref_log_p: `[..., V]` of the reference.

    Returns:
        `[...]`, never negative; differentiable. A token that the policy rules out adds nothing.
    """
    assert log_p.shape == ref_log_p.shape, f"{log_p.shape} against {ref_log_p.shape}"
    ruled_out = log_p == -torch.inf
    return (log_p.masked_fill(ruled_out, 0.0).exp() * (log_p - ref_log_p).masked_fill(ruled_out, 0.0)).sum(-1)


@dataclass(frozen=True)
class FixedKL:
    """A weight that never changes."""

    coef: float

    def update(self, current_kl: float, *, num_steps: int) -> Self:
        """The controller of the next step: this one."""
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """A weight steered towards a target divergence (Ziegler et al. 2019, section 2.2).

    `coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_steps / horizon)`. `coef` is its whole state.
    """

    coef: float
    target: float
    horizon: int

    def update(self, current_kl: float, *, num_steps: int) -> Self:
        """The controller after `num_steps` more samples whose mean divergence was `current_kl`.

        It stays as it is where that is not finite: `coef` would be NaN for good.
        """
        if not math.isfinite(current_kl):
            return self
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * num_steps / self.horizon))
