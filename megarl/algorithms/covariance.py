"""The choice of the tokens that drain a policy's entropy, for the losses `clip_cov` and `kl_cov`.

Invariant: the choice is a pure function of a *complete* mini-batch and of the policy before this step's updates. So
every rank makes the same choice before the mini-batch is divided, and no split changes it. (At the first update of a
step that policy is the one being trained, as in the paper. Later the authors' code chooses again in each
micro-batch.)

Source: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", section 4.
"""

import torch
from torch import Tensor

from megarl.algorithms.masked import masked, masked_mean

SEED = 0


def token_covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return each token's share of the covariance between log-probability and advantage.

    `(log_probs - mean(log_probs)) * (A - mean(A))` with the means over all unmasked tokens. A large positive share,
    of a likely token that did well, makes the policy certain.

    Args:
        log_probs: `[B, T]`.
        advantages: `[B, T]`.
        mask: `[B, T]` bool.

    Returns:
        `[B, T]` float64, zero under the mask.
    """
    centred = [masked(x, mask).double() - masked_mean(x.double(), mask) for x in (log_probs, advantages)]
    return masked(centred[0] * centred[1], mask)


def clip_cov_tokens(covariances: Tensor, mask: Tensor, *, ratio: float, lower: float, upper: float) -> Tensor:
    """Draw the tokens of `clip_cov`: at most a share `ratio` of all, and at least one if any qualifies.

    The draw is uniform over the tokens whose covariance is between `lower` and `upper`, with a generator of its own:
    the same mini-batch always gives the same tokens.

    Args:
        covariances: `[B, T]`, see `token_covariances`.
        mask: `[B, T]` bool.
        ratio: share of the unmasked tokens.
        lower: lower bound of the covariance, far above the mean.
        upper: upper bound of the covariance.

    Returns:
        `[B, T]` bool.
    """
    candidates = (mask & (covariances > lower) & (covariances < upper)).flatten().nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(SEED))
    return _at(candidates[order[: _share(mask, ratio)].to(mask.device)], mask)


def kl_cov_tokens(covariances: Tensor, mask: Tensor, *, ratio: float) -> Tensor:
    """Return the tokens of `kl_cov`: the share `ratio` of all with the largest covariances, and at least one token.

    Args:
        covariances: `[B, T]`, see `token_covariances`.
        mask: `[B, T]` bool.
        ratio: share of the unmasked tokens.

    Returns:
        `[B, T]` bool; of equal covariances the first in the batch.
    """
    candidates = mask.flatten().nonzero()[:, 0]
    order = covariances.flatten()[candidates].argsort(descending=True, stable=True)
    return _at(candidates[order[: _share(mask, ratio)]], mask)


def _share(mask: Tensor, ratio: float) -> int:
    return max(int(ratio * int(mask.sum())), 1)


def _at(places: Tensor, mask: Tensor) -> Tensor:
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    return chosen.index_fill(0, places, True).view(mask.shape)
