"""Sums over a rank's slice of the logits, and the gradient of the logits: one pass each.

On CUDA a Triton kernel reads every logit once; elsewhere a few operations of torch compute the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def moments(logits: Tensor, targets: Tensor, *, with_entropy: bool) -> Tensor:
    """Return [3, N] float32 for each row z of [N, V] float32 logits: m = max z, z_target, and sum e^(z-m).

    An entropy needs a fourth number: sum e^(z-m) z. `targets` [N] int64 are columns. z_target is 0 if there is no such
    column: another rank has it.
    """
    if logits.is_cuda:
        from megarl.learner.kernels import softmax as kernels

        return kernels.moments(logits, targets, with_entropy=with_entropy)
    maximum = logits.amax(-1)
    exponentials = (logits - maximum[:, None]).exp_()
    mine = (targets >= 0) & (targets < logits.shape[1])
    picked = logits.gather(1, targets.where(mine, 0)[:, None])[:, 0].where(mine, 0.0)
    found = [maximum, picked, exponentials.sum(-1)]
    if with_entropy:
        found.append(exponentials.mul_(logits).sum(-1))
    return torch.stack(found)


def merge(moments: Tensor, maximum: Tensor) -> Tensor:
    """Return all but the first number with respect to the [N] maximum over all ranks: they add up over the ranks."""
    sums = moments[1:].clone()
    sums[1:] *= (moments[0] - maximum).exp()
    return sums


def gradient(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    grad_log_probs: Tensor,
    of_entropy: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Return the [N, V] gradient of the logits; may overwrite the logits.

    With p = softmax(z) and H = -sum p log p:  d log p_t / dz = onehot_t - p  and  dH/dz = -p (log p + H).

    Args:
        logits: [N, V] float32.
        targets: [N] int64 columns; a target without a column is another rank's.
        normalizer: [N] float32, the logarithm of the sum of all exponentials.
        grad_log_probs: [N] float32, the gradient of the targets' log-probabilities.
        of_entropy: the entropies and their gradient, each [N] float32; empty: nobody asked for entropies.
        dtype: of the result.
    """
    if logits.is_cuda:
        from megarl.learner.kernels import softmax as kernels

        return kernels.gradient(logits, targets, normalizer, grad_log_probs, of_entropy, dtype)
    log_p = logits.sub_(normalizer[:, None])
    slope = grad_log_probs[:, None]
    if of_entropy and of_entropy[1].any():  # the loss has an entropy term
        entropy, grad_entropy = of_entropy
        slope = slope + grad_entropy[:, None] * (log_p + entropy[:, None])
    grad = log_p.exp_().mul_(-slope)
    mine = (targets >= 0) & (targets < grad.shape[1])
    grad.scatter_add_(1, targets.where(mine, 0)[:, None], grad_log_probs.where(mine, 0.0)[:, None])
    return grad.to(dtype)
