"""Statistics of all samples of a step, equal on every rank however the samples are spread.

Each sample contributes numbers of its own tokens, in float64. The numbers of all samples are added in their order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.masked import masked
from megarl.batch import Rollouts
from megarl.columns import on_tokens, reduced, sample_sums
from megarl.distributed.sharded import Sharded
from megarl.training.interfaces import Metrics


def spread(name: str, x: Tensor) -> Metrics:
    """Return mean, largest and smallest of numbers that every rank has."""
    x = x.double()  # the sum of finite scores may be too large for float32
    return {f"{name}/mean": float(x.mean()), f"{name}/max": float(x.max()), f"{name}/min": float(x.min())}


Derived = Callable[..., Sequence[Tensor]]
"""Makes columns of other columns, each token from its own numbers."""


def _themselves(*columns: Tensor) -> Sequence[Tensor]:
    return columns


def on_learnt(share: Rollouts, column: Tensor) -> Tensor:
    """Return a column `[n]` with zeros on tokens that are not of the policy."""
    return column if share.is_all_learnt else masked(column, share.mask)


@dataclass(frozen=True)
class Summary:
    """Statistics of numbers of tokens; all are 0 without tokens."""

    mean: float
    variance: float  # unbiased; 0 for a single token
    largest: float
    smallest: float

    def metrics(self, name: str) -> Metrics:
        """Return mean, largest and smallest."""
        return {f"{name}/mean": self.mean, f"{name}/max": self.largest, f"{name}/min": self.smallest}


def summaries(samples: Sharded[Rollouts], *columns: Tensor, of: Derived = _themselves) -> list[Summary]:
    """Summarize what is derived from columns `[n]` of this rank's share, over the tokens of the policy. Collective.

    The variance follows from sums of squares around the mean of each sample, because the values of a batch may be large
    compared with their spread: Chan et al. 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", equation 2.1.
    """
    of_blocks = [moments_of_samples(of(*parts), counts) for counts, parts in samples.share.learnt_blocks(*columns)]
    return joined(samples, samples.gather(torch.cat(of_blocks)))


def joined(samples: Sharded[Rollouts], moments: Tensor) -> list[Summary]:
    """Join what `moments_of_samples` returned, of all samples: `[B, k, 4]`."""
    kinds = moments.permute(1, 2, 0).contiguous()  # numbers of a kind are neighbours
    return [_joined(samples.index.num_learnt, *of_samples) for of_samples in kinds]


def summary_of_samples(samples: Sharded[Rollouts], numbers: Tensor) -> Summary:
    """Summarize `numbers` `[B]` as if each token of the policy had that of its sample."""
    numbers = numbers.double()
    counts = samples.index.num_learnt
    return _joined(counts, counts * numbers, torch.zeros_like(numbers), numbers, numbers)


def moments_of_samples(columns: Sequence[Tensor], counts: Tensor) -> Tensor:
    """Return sum, sum of squares around the mean, largest and smallest of each sample: `[b, k, 4]` float64.

    The `k` columns `[n]` are those of samples with `counts` tokens each.
    """
    found = []
    for numbers in columns:
        deviations = numbers.double()
        total = sample_sums(deviations, counts)
        deviations = on_tokens(total / counts.clamp(min=1), counts).sub_(deviations)
        extremes = (reduced(kind, numbers, counts).double() for kind in (np.maximum, np.minimum))
        found.append(torch.stack([total, sample_sums(deviations.square_(), counts), *extremes], dim=-1))
    return torch.stack(found, dim=1)


def _joined(counts: Tensor, totals: Tensor, squares: Tensor, largest: Tensor, smallest: Tensor) -> Summary:
    """Join the numbers of samples with `counts` tokens each: `[B]`."""
    if not counts.all():
        has_tokens = counts > 0
        numbers = (counts, totals, squares, largest, smallest)
        counts, totals, squares, largest, smallest = (each[has_tokens] for each in numbers)
    if not len(counts):
        return Summary(0.0, 0.0, 0.0, 0.0)
    total = int(counts.sum())
    middle = totals.sum() / total
    between = (counts * (totals / counts - middle).square()).sum()
    variance = (squares.sum() + between) / max(total - 1, 1)
    return Summary(float(middle), float(variance), float(largest.max()), float(smallest.min()))


def mean(samples: Sharded[Rollouts], column: Tensor) -> float:
    """Return the mean over the tokens of the policy; 0 without any. Collective."""
    share = samples.share
    return float(samples.gather(share.sums(on_learnt(share, column))).sum() / num_tokens(samples))


def mean_of_samples(samples: Sharded[Rollouts], column: Tensor) -> float:
    """Return the mean over the samples of their means over the tokens of the policy; 0 without any. Collective."""
    share, counts = samples.share, samples.index.num_learnt
    totals = samples.gather(share.sums(on_learnt(share, column)))
    return float((totals / counts.clamp(min=1)).sum() / max(int((counts > 0).sum()), 1))


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
