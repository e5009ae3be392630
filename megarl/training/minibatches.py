"""The global mini-batches of a step: a seeded permutation of its prompts, cut into equal parts."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import TypeVar

import torch
from torch import Tensor

from megarl.batch import Rollouts
from megarl.distributed.sharded import Sharded

R = TypeVar("R", bound=Rollouts)


@dataclass(frozen=True, kw_only=True)
class MiniBatches:
    """How the prompts of a step are divided into mini-batches.

    The order is a pure function of seed and step, the same on every rank; each epoch has its own. The last mini-batch
    of an epoch is smaller if `num_prompts` does not divide the number of prompts.
    """

    num_prompts: int  # of a mini-batch, with all their samples
    num_epochs: int
    shuffle: bool
    seed: int

    def prompts(self, total: int, *, step: int) -> Iterator[Tensor]:
        """Yield the prompts of each mini-batch of a step with `total` prompts: positions, int64."""
        generator = torch.Generator().manual_seed(self.seed + step)
        shuffle = self.shuffle and self.num_prompts < total
        for _ in range(self.num_epochs):
            order = torch.randperm(total, generator=generator) if shuffle else torch.arange(total)
            yield from order.split(self.num_prompts)

    def members(self, groups: Tensor, total: int, *, step: int) -> Iterator[Tensor]:
        """Yield the members of each mini-batch of a step with `total` prompts, ascending: int64.

        `groups` `[n]` int64 are the prompts of samples, or of runs of samples.
        """
        for chosen in self.prompts(total, step=step):
            is_chosen = torch.zeros(total, dtype=torch.bool).index_fill(0, chosen, True)
            yield is_chosen[groups].nonzero()[:, 0]

    def of(self, samples: Sharded[R], *, step: int) -> Iterator[Sharded[R]]:
        """Yield each mini-batch of the samples of a step."""
        index = samples.index
        if self.num_prompts >= len(index.prompts):
            yield from repeat(samples, self.num_epochs)
            return
        for chosen in self.members(index.groups, len(index.prompts), step=step):
            yield samples.select(chosen)
