"""The divergence from the reference policy, estimated from sampled tokens or exact, and controllers of its weight."""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from megarl.algorithms.config import STRAIGHT_THROUGH, ExactKL, KLEstimator, SampledKL
from megarl.algorithms.masked import masked

LOG_RATIO_LIMIT = 20.0


def bounded_exp(x: Tensor) -> Tensor:
    """Return `exp(x)` with `x` clamped to +-20: far outside any clip range, and still finite in float32.

    An infinite ratio would become NaN in the backward pass, even if the loss ignores it (0 * inf).
    """
    return torch.exp(x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, *, kind: SampledKL, k3_bound: float | None = None) -> Tensor:
    """Estimate `KL(policy || reference)` at each token from tokens that the policy sampled.

    With `d = log_probs - ref_log_probs` (Schulman 2020, "Approximating KL Divergence"):

    - `kl`, `k1`: `d`, unbiased, of high variance, may be negative;
    - `abs`: `|d|`;
    - `mse`, `k2`: `d^2 / 2`, biased, of low variance;
    - `low_var_kl`, `k3`: `exp(-d) + d - 1`, unbiased and never negative;
    - `kl+`, `k1+`, `abs+`, `low_var_kl+`, `k3+`: the same value with the gradient of `mse`, `d` times the score.

    The exponential of `k3` lets one token that is far likelier under the reference outweigh all others. `k3_bound`
    limits the estimate: a token above the bound counts as the bound and has no gradient, except that of `k3+`.

    An estimate that is unbiased in the reward may have a biased gradient as a loss (Tang & Munos 2025, "On a few
    pitfalls in KL divergence gradient estimation for RL"). With tokens drawn from the policy itself, the mean gradient
    of `kl` is 0, so that as a loss it only adds noise. The gradient of `mse` is that of the divergence. The gradient of
    `low_var_kl` is that of `KL(reference || policy)`, which is close to it near the reference. The gradient of `abs` is
    `sign(d)` times the score, and does not shrink near the reference. A name with `+` joins an estimate to the gradient
    of the divergence, as a straight-through estimator does (Bengio et al. 2013, arXiv 1308.3432).

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
        case "kl" | "k1" | "kl+" | "k1+":
            estimate = difference
        case "abs" | "abs+":
            estimate = difference.abs()
        case "mse" | "k2":
            estimate = 0.5 * difference**2
        case "low_var_kl" | "k3" | "low_var_kl+" | "k3+":
            estimate = bounded_exp(-difference) + difference - 1.0
            if k3_bound is not None:
                estimate = estimate.clamp(max=k3_bound)
    if kind not in STRAIGHT_THROUGH:
        return estimate
    half_square = 0.5 * difference**2
    return estimate.detach() + (half_square - half_square.detach())


def token_divergence(
    kind: KLEstimator,
    exact: Tensor | None,
    log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
    mask: Tensor,
    *,
    k3_bound: float | None,
) -> Tensor:
    """Return the divergence of each token from the reference, zero outside the mask.

    An exact kind is `exact`; a sampled kind is the `kl_penalty` of the log-probabilities. All are of one shape.
    """
    match kind:
        case "full" | "full_forward" | "full_js":
            assert exact is not None, "outputs that were not taken against the reference"
            return masked(exact, mask)
        case _:
            assert log_probs is not None and ref_log_probs is not None, "a sampled KL without log-probabilities"
            return kl_penalty(masked(log_probs, mask), masked(ref_log_probs, mask), kind=kind, k3_bound=k3_bound)


@dataclass(frozen=True)
class Divergence:
    """An exact divergence of the policy's distribution p from the reference's q: a sum over the vocabulary.

    - `full`: `KL(p || q)`, the reverse divergence of distillation, which avoids what the reference avoids;
    - `full_forward`: `KL(q || p)`, which covers what the reference may choose;
    - `full_js`: `beta KL(q || m) + (1 - beta) KL(p || m)` with `m = beta q + (1 - beta) p`, at most ln 2
      (Agarwal et al. 2024, arXiv 2306.13649, equation 1 with the reference as teacher).
    """

    kind: ExactKL = "full"
    beta: float = 0.5

    def summands(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summands d of the divergence D, and s = p dD/dp up to a multiple of p.

        The gradient in the logits of p is `s - p sum s`, with the sum over the vocabulary.

        Args:
            log_p: `[N, V]` float32 log-probabilities of the policy for a part of the vocabulary. Must be finite.
            log_q: `[N, V]` of the reference. Must be finite.

        Returns:
            d and s, `[N, V]`, which may be the same tensor. At most five such tensors exist at once, inputs included.
        """
        match self.kind:
            case "full":
                d = (log_p - log_q).mul_(log_p.exp())
                return d, d
            case "full_forward":
                q = log_q.exp()
                return (log_q - log_p).mul_(q), q.neg_()
            case "full_js":
                log_m = torch.logaddexp(log_q + math.log(self.beta), log_p + math.log(1.0 - self.beta))
                s = (log_p - log_m).mul_(log_p.exp()).mul_(1.0 - self.beta)
                d = log_m.neg_().add_(log_q).mul_(log_q.exp()).mul_(self.beta).add_(s)
                return d, s


@dataclass(frozen=True)
class FixedKL:
    """A weight that never changes."""

    coef: float

    def update(self, current_kl: float, *, num_steps: int) -> Self:
        """Return the controller of the next step: this one."""
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """A weight steered towards a target divergence (Ziegler et al. 2019, section 2.2).

    `coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(num_steps / horizon, 1))`. `coef` is its whole state.
    The paper has no bound of 1, and a step of five horizons of samples would turn the sign of the weight.
    """

    coef: float
    target: float
    horizon: int

    def update(self, current_kl: float, *, num_steps: int) -> Self:
        """Return the controller after `num_steps` more samples whose mean divergence was `current_kl`.

        A divergence that is not finite changes nothing, because `coef` would stay NaN.
        """
        if not math.isfinite(current_kl):
            return self
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * min(num_steps / self.horizon, 1.0)))
