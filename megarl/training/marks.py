"""The choice of the tokens that the losses `clip_cov` and `kl_cov` treat differently.

Invariant: the choice is a pure function of a *complete* mini-batch and of the policy before this step's updates. No
rank sends a token: ranks count, and each marks its own. (At the first update of a step that policy is the one being
trained, as in the paper. Later the authors' code chooses again in each micro-batch.)
"""

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.config import LOSSES, PolicyLossSection
from megarl.algorithms.covariance import token_covariances
from megarl.batch import Experience, Marked
from megarl.data.permutation import permuted
from megarl.distributed.selection import kth_largest
from megarl.distributed.sharded import Sharded
from megarl.training.statistics import mean, num_tokens, numbers_of


def mark(minibatch: Sharded[Experience], settings: PolicyLossSection) -> Sharded[Experience]:
    """Mark the tokens that the loss treats differently. Collective.

    Return the mini-batch itself if the loss treats all tokens alike.
    """
    if not LOSSES[settings.loss_mode].chooses:
        return minibatch
    share = minibatch.share
    assert share.old_log_probs is not None, "covariances without the old log-probabilities"
    mean_log_prob = mean(minibatch, share.old_log_probs)
    covariances = token_covariances(
        share.old_log_probs,
        share.advantages,
        share.mask,
        mean_log_prob=mean_log_prob,
        mean_advantage=mean(minibatch, share.advantages),
    )
    if settings.loss_mode == "clip_cov":
        marked = _drawn(minibatch, covariances, settings, key=int(np.float64(mean_log_prob).view(np.uint64)))
    else:
        marked = _largest(minibatch, covariances, settings)
    return minibatch.with_share(share.extend(Marked, marked=marked))


def _drawn(minibatch: Sharded[Experience], covariances: Tensor, settings: PolicyLossSection, *, key: int) -> Tensor:
    """Draw the tokens of `clip_cov`, `[n]` bool: at most a share of all, and at least one if any qualifies.

    The draw is the beginning of a random order, which `key` chooses, of the tokens whose covariance is between the
    bounds. So the same mini-batch always gives the same tokens.
    """
    is_between = (covariances > settings.clip_cov_lb) & (covariances < settings.clip_cov_ub)
    candidates = minibatch.share.mask & is_between
    numbers, total = numbers_of(minibatch, candidates)
    places = permuted(numbers[candidates].numpy(), total, key=(key,))
    marked = torch.zeros_like(candidates)
    marked[candidates] = torch.from_numpy(places < _most(minibatch, settings.clip_cov_ratio))
    return marked


def _largest(minibatch: Sharded[Experience], covariances: Tensor, settings: PolicyLossSection) -> Tensor:
    """Return the tokens of `kl_cov`, `[n]` bool: the share of all with the largest covariances, and at least one.

    Of equal covariances the first in the mini-batch are taken.
    """
    mask = minibatch.share.mask
    most = _most(minibatch, settings.kl_cov_ratio)
    border = kth_largest(covariances[mask], most, counts=minibatch.shares.reports)
    above = mask & (covariances > border)
    equal = mask & (covariances == border)
    _, num_above = numbers_of(minibatch, above)
    numbers, _ = numbers_of(minibatch, equal)
    return above | (equal & (numbers < most - num_above))


def _most(minibatch: Sharded[Experience], ratio: float) -> int:
    return max(int(ratio * num_tokens(minibatch)), 1)
