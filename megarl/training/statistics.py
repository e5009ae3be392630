"""Statistics of all samples of a step, equal on every rank however the samples are spread.

Each sample contributes numbers of its own tokens, in float64. The numbers of all samples are added in their order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.masked import masked
from megarl.batch import Rollouts, on_tokens, reduced, sample_sums
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


def token_spread(name: str, samples: Sharded[Rollouts], column: Tensor) -> Metrics:
    """Return mean, largest and smallest of a column `[n]` over the tokens of the policy. Collective."""
    [summary] = summaries(samples, column)
    return summary.metrics(name)


def summaries(samples: Sharded[Rollouts], *columns: Tensor, of: Derived = _themselves) -> list[Summary]:
    """Summarize what is derived from columns `[n]` of this rank's share, over the tokens of the policy. Collective.

    The variance follows from sums of squares around the mean of each sample, because the values of a batch may be large
    compared with their spread: Chan et al. 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", equation 2.1.
    """
    of_blocks = [
        torch.stack([_of_samples(numbers, counts) for numbers in of(*parts)], dim=1)
        for counts, parts in samples.share.learnt_blocks(*columns)
    ]
    of_share = torch.cat(of_blocks)
    has_tokens = samples.index.num_learnt > 0
    if not has_tokens.any():
        return [Summary(0.0, 0.0, 0.0, 0.0)] * of_share.shape[1]
    counts = samples.index.num_learnt[has_tokens]
    return [_joined(counts, *of_samples.unbind(-1)) for of_samples in samples.gather(of_share)[has_tokens].unbind(1)]


def _of_samples(numbers: Tensor, counts: Tensor) -> Tensor:
    """Return sum, sum of squares around the mean, largest and smallest of each sample: `[b, 4]` float64.

    `numbers` `[n]` are those of samples with `counts` tokens each.
    """
    total = sample_sums(numbers, counts)
    deviations = on_tokens(total / counts.clamp(min=1), counts).sub_(numbers)
    extremes = (reduced(kind, numbers, counts).double() for kind in (np.maximum, np.minimum))
    return torch.stack([total, sample_sums(deviations.square_(), counts), *extremes], dim=-1)


def _joined(counts: Tensor, totals: Tensor, squares: Tensor, largest: Tensor, smallest: Tensor) -> Summary:
    """Join the numbers of samples with `counts` tokens each: `[B]`, none 0."""
    total = int(counts.sum())
    middle = totals.sum() / total
    between = (counts * (totals / counts - middle).square()).sum()
    variance = (squares.sum() + between) / max(total - 1, 1)
    return Summary(float(middle), float(variance), float(largest.max()), float(smallest.min()))


def mean(samples: Sharded[Rollouts], column: Tensor) -> float:
    """Return the mean over the tokens of the policy; 0 without any. Collective."""
    share = samples.share
    return float(samples.gather(share.sums(on_learnt(share, column))).sum() / num_tokens(samples))


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
