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
    values = (column if share.is_all_learnt else column[share.mask]).double()
    found = torch.zeros(len(share), 3, dtype=torch.float64)
    if len(share):  # torch refuses to reduce no segment
        of_kinds = [torch.segment_reduce(values, kind, lengths=share.num_learnt()) for kind in ("sum", "max", "min")]
        found = torch.stack(of_kinds, dim=-1)
    sums, largest, smallest = samples.gather(found).unbind(-1)
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


def numbers_of(samples: Sharded[Rollouts], marked: Tensor) -> tuple[Tensor, int]:
    """Number the marked tokens (`[n]` bool of this rank's share) of all samples, in their order. Collective.

    Returns:
        The number of each marked token, `[n]` int64, which means nothing for other tokens; and how many are marked.
    """
    share = samples.share
    own = share.sums(marked)
    of_all = samples.gather(own)
    before = (of_all.cumsum(0) - of_all)[samples.mine] - (own.cumsum(0) - own)
    starts = share.on_tokens(before.to(torch.int64))
    return marked.cumsum(0) - 1 + starts, int(of_all.sum())
