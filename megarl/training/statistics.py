"""Statistics of all samples of a step, equal on every rank however the samples are spread.

Each sample contributes numbers of its own tokens, in float64. The numbers of all samples are added in their order.
"""

import torch
from torch import Tensor

from megarl.batch import Rollouts
from megarl.distributed.sharded import Sharded
from megarl.training.interfaces import Metrics


def spread(name: str, x: Tensor) -> Metrics:
    """Return mean, largest and smallest of numbers that every rank has."""
    x = x.double()  # the sum of finite scores may be too large for float32
    return {f"{name}/mean": float(x.mean()), f"{name}/max": float(x.max()), f"{name}/min": float(x.min())}


def token_spread(name: str, samples: Sharded[Rollouts], column: Tensor) -> Metrics:
    """Return the metrics of the numbers that `extent` returns."""
    middle, largest, smallest = extent(samples, column)
    return {f"{name}/mean": middle, f"{name}/max": largest, f"{name}/min": smallest}


def extent(samples: Sharded[Rollouts], column: Tensor) -> tuple[float, float, float]:
    """Return mean, largest and smallest over the tokens of the policy. `column` `[n]` is of this rank's share."""
    share = samples.share
    values = column[share.mask].double()
    counts = share.num_learnt()
    found = [torch.segment_reduce(values, kind, lengths=counts) for kind in ("sum", "max", "min")]
    sums, largest, smallest = samples.gather(torch.stack(found, dim=-1)).unbind(-1)
    has_tokens = samples.index.num_learnt > 0
    middle = float(sums.sum() / num_tokens(samples))
    return middle, float(largest[has_tokens].max()), float(smallest[has_tokens].min())


def moments(samples: Sharded[Rollouts], column: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance over the tokens of the policy: two 0-dim float64 tensors, 0 if undefined.

    It takes two passes, because the values of a batch may be large compared with their spread.
    """
    share = samples.share
    total = num_tokens(samples)
    mean = samples.gather(share.sums(column.double() * share.mask)).sum() / total
    squares = (column.double() - mean) ** 2 * share.mask
    return mean, samples.gather(share.sums(squares)).sum() / max(total - 1, 1)


def mean(samples: Sharded[Rollouts], column: Tensor) -> float:
    """Return the mean over the tokens of the policy; 0 without any."""
    share = samples.share
    return float(samples.gather(share.sums(column.double().masked_fill(~share.mask, 0.0))).sum() / num_tokens(samples))


def num_tokens(samples: Sharded[Rollouts]) -> int:
    """Return the number of tokens of the policy; 1 instead of 0."""
    return max(int(samples.index.num_learnt.sum()), 1)
