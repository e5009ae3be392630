"""Sums and means over the tokens that count.

Invariant: a value at a masked position never matters, not even NaN or infinity, neither forward nor backward. Values
are therefore replaced before the arithmetic; multiplying by the mask would keep a NaN.
"""

import torch
from torch import Tensor


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` with zeros, and zero gradients, at the positions that are False in `mask`, of the same shape."""
    assert x.shape == mask.shape, f"{tuple(x.shape)} values under a mask of {tuple(mask.shape)}"
    assert mask.dtype == torch.bool, f"the mask is {mask.dtype}, not bool"
    return x.masked_fill(~mask, 0.0)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the unmasked elements of `x`, a 0-dim tensor; 0 if there is none."""
    return masked(x, mask).sum() / mask.sum().clamp(min=1)


def masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance of the unmasked elements of `x`: two 0-dim float64 tensors, 0 if undefined.

    It takes two passes in float64, because the values of a batch may be large compared with their spread.
    """
    x = masked(x, mask).double()
    mean = masked_mean(x, mask)
    variance = masked((x - mean) ** 2, mask).sum() / (mask.sum() - 1).clamp(min=1)
    return mean, variance
