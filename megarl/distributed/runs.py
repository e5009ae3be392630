"""Runs of neighbouring samples that have the same prompt and the same share.

A step has many samples of each prompt, which usually stay together. So what depends on prompt and share alone is
computed for a run instead of for each of its samples.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megarl.columns import counted_from, on_tokens, reduced


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The prompt and the share of each of `B` samples, in `R` runs."""

    groups: Tensor  # [R] int64: the prompt
    owners: Tensor  # [R] int64: the share that has the samples
    counts: Tensor  # [R] int64: the number of samples

    @classmethod
    def of(cls, groups: Tensor, owners: Tensor, counts: Tensor | None = None) -> "Runs":
        """Return the runs of neighbouring samples.

        Args:
            groups: `[n]` int64, the prompts of `n` neighbours.
            owners: `[n]` int64, their shares.
            counts: `[n]` int64, the number of samples of each neighbour; None: one.
        """
        is_last = np.ones(len(groups), dtype=bool)
        prompts = groups.numpy()
        shares = owners.numpy()
        is_last[:-1] = (prompts[1:] != prompts[:-1]) | (shares[1:] != shares[:-1])
        lasts = torch.from_numpy(np.flatnonzero(is_last))
        ends = lasts + 1 if counts is None else counts.cumsum(0)[lasts]
        return cls(groups=groups[lasts], owners=owners[lasts], counts=ends.diff(prepend=torch.zeros_like(ends[:1])))

    @classmethod
    def of_groups(cls, owners: Tensor, size: int) -> "Runs":
        """Return the runs of the samples of neighbouring groups.

        Args:
            owners: `[B]` integers, the share of each sample.
            size: the samples of each group.
        """
        groups = torch.arange(len(owners) // size)
        shares = owners.numpy()
        is_other = shares[1:] != shares[:-1]
        is_other[size - 1 :: size] = False
        if is_other.any():
            return cls.of(groups.repeat_interleave(size), owners.to(torch.int64))
        return cls(groups=groups, owners=owners[::size].to(torch.int64), counts=torch.full_like(groups, size))

    def owned_by(self, owners: Tensor) -> "Runs":
        """Return the runs of the same samples if these shares, int64 `[R]`, have them."""
        return replace(self, owners=owners) if self.keep_groups else Runs.of(self.groups, owners, self.counts)

    @cached_property
    def ends(self) -> Tensor:
        """The place after the last sample of each run: `[R]` int64."""
        return self.counts.cumsum(0)

    @cached_property
    def keep_groups(self) -> bool:
        """Whether the samples of each prompt are one run, in the order of the prompts."""
        groups = self.groups.numpy()
        return bool((groups[1:] > groups[:-1]).all())

    def of_samples(self, samples: Tensor) -> Tensor:
        """Return the run of each of a few given samples: int64 `[b]`."""
        return torch.from_numpy(self.ends.numpy().searchsorted(samples.numpy(), side="right"))

    def groups_of(self, samples: Tensor) -> Tensor:
        """Return the prompt of each of a few given samples: int64 `[b]`."""
        return self.groups[self.of_samples(samples)]

    def owners_of(self, samples: Tensor) -> Tensor:
        """Return the share of each of a few given samples: int64 `[b]`."""
        return self.owners[self.of_samples(samples)]

    def on_samples(self, numbers: Tensor) -> Tensor:
        """Return the number of its run, of `[R]`, for each sample: `[B]`."""
        return on_tokens(numbers, self.counts)

    def sums(self, numbers: Tensor) -> Tensor:
        """Return the sum over the samples of each run, `[R]`, of numbers of samples, int64 `[B]`."""
        counts = self.counts.numpy()
        if len(counts) and (counts == counts[0]).all():
            return numbers.view(len(counts), -1).sum(1)
        return reduced(np.add, numbers, self.counts)

    def places(self, share: int) -> Tensor:
        """Return the places of the samples of a share among all: int64 `[b]`, ascending."""
        if share not in self._places:
            runs = torch.from_numpy(np.flatnonzero(self.owners.numpy() == share))
            counts = self.counts[runs]
            self._places[share] = counted_from(self.ends[runs] - counts, counts)
        return self._places[share]

    @cached_property
    def _places(self) -> dict[int, Tensor]:
        """The results of `places` so far, by share."""
        return {}
