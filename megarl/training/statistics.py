"""Statistics of all samples of a step, equal on every rank however the samples are spread.

Each sample contributes numbers of its own tokens, in float64, which `Sharded.sum` adds exactly. A rank gets no numbers
of other ranks' samples, so a statistic costs it the work of its own share.
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


@dataclass(frozen=True)
class Spread:
    """Mean, largest and smallest of numbers."""

    mean: float
    largest: float
    smallest: float

    def metrics(self, name: str) -> Metrics:
        """Return them by name."""
        return {f"{name}/mean": self.mean, f"{name}/max": self.largest, f"{name}/min": self.smallest}


def spread(name: str, x: Tensor) -> Metrics:
    """Return mean, largest and smallest of numbers that every rank has."""
    total = float(x.double().sum() if x.is_floating_point() else x.sum())  # that of float32 may be too large for it
    return Spread(total / len(x), float(x.max()), float(x.min())).metrics(name)


def spreads(samples: Sharded[Rollouts], columns: Sequence[Tensor]) -> list[Spread]:
    """Return mean, largest and smallest over all samples, of columns `[b]` of this rank's samples. Collective."""
    numbers = torch.stack([column.double() for column in columns], dim=-1)
    means = samples.sum(numbers) / len(samples)
    return [Spread(*each) for each in torch.stack([means, *samples.extremes(numbers)], dim=-1).tolist()]


Derived = Callable[..., Sequence[Tensor]]
"""Makes columns of other columns, each token from its own numbers."""


def _themselves(*columns: Tensor) -> Sequence[Tensor]:
    return columns


def on_learnt(share: Rollouts, column: Tensor) -> Tensor:
    """Return a column `[n]` with zeros on tokens that are not of the policy."""
    return column if share.is_all_learnt else masked(column, share.mask)


@dataclass(frozen=True)
class Summary(Spread):
    """Statistics of numbers of tokens; all are 0 without tokens."""

    variance: float  # unbiased; 0 for a single token


def summaries(samples: Sharded[Rollouts], *columns: Tensor, of: Derived = _themselves) -> list[Summary]:
    """Summarize what is derived from columns `[n]` of this rank's share, over the tokens of the policy. Collective.

    The variance follows from sums of squares around the mean of each sample, because the values of a batch may be large
    compared with their spread: Chan et al. 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", equation 2.1.
    """
    found = [
        (counts, moments_of_samples(of(*parts), counts)) for counts, parts in samples.share.learnt_blocks(*columns)
    ]
    counts, moments = (torch.cat(parts) for parts in zip(*found, strict=True))
    return joined(samples, counts, moments)


def joined(samples: Sharded[Rollouts], counts: Tensor, moments: Tensor) -> list[Summary]:
    """Join the moments of all samples. Collective.

    Args:
        samples: this rank has `b` of them.
        counts: `[b]` int64, the tokens that each of this rank's samples has moments of.
        moments: `[b, k, 4]`, as `moments_of_samples` returns them.
    """
    if not counts.all():
        has_tokens = counts > 0
        counts = counts[has_tokens]
        moments = moments[has_tokens]
    totals, squares, highest, lowest = moments.unbind(-1)
    counts = counts[:, None].double()
    *of_columns, total = samples.sum(torch.cat([totals, counts], dim=-1)).tolist()
    if not total:
        return [Summary(0.0, 0.0, 0.0, 0.0)] * len(of_columns)
    means = torch.tensor(of_columns, dtype=torch.float64) / total
    between = counts * (totals / counts - means).square()
    around, inside = samples.sum(torch.stack([between, squares], dim=1))
    variances = (inside + around) / max(total - 1.0, 1.0)
    largest, smallest = samples.extremes(torch.stack([highest, lowest], dim=1))
    return [Summary(*each) for each in torch.stack([means, largest[0], smallest[1], variances], dim=-1).tolist()]


def summary_of_samples(samples: Sharded[Rollouts], numbers: Tensor) -> Summary:
    """Summarize `numbers` `[b]` of this rank's samples as if each token of the policy had that of its sample.

    Collective.
    """
    numbers = numbers.double()
    counts = samples.share.num_learnt()
    moments = torch.stack([counts * numbers, torch.zeros_like(numbers), numbers, numbers], dim=-1)
    [summary] = joined(samples, counts, moments[:, None])
    return summary


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


def mean(samples: Sharded[Rollouts], column: Tensor) -> float:
    """Return the mean over the tokens of the policy; 0 without any. Collective."""
    share = samples.share
    numbers = torch.stack([share.sums(on_learnt(share, column)), share.num_learnt().double()], dim=-1)
    total, number = samples.sum(numbers).tolist()
    return total / max(number, 1.0)


def mean_of_samples(samples: Sharded[Rollouts], column: Tensor) -> float:
    """Return the mean over the samples of their means over the tokens of the policy; 0 without any. Collective."""
    share = samples.share
    counts = samples.share.num_learnt()
    means = share.sums(on_learnt(share, column)) / counts.clamp(min=1)
    total, number = samples.sum(torch.stack([means, (counts > 0).double()], dim=-1)).tolist()
    return total / max(number, 1.0)


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
