"""The global mini-batches of a step: a seeded permutation of its prompts, cut into equal parts."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


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
        for _ in range(self.num_epochs):
            order = torch.randperm(total, generator=generator) if self.shuffle else torch.arange(total)
            yield from order.split(self.num_prompts)

    def samples(self, groups: Tensor, total: int, *, step: int) -> Iterator[Tensor]:
        """Yield the samples of each mini-batch, ascending: int64. `groups` `[B]` are the prompts of the samples."""
        for chosen in self.prompts(total, step=step):
            if len(chosen) == total:
                yield torch.arange(len(groups))
                continue
            is_chosen = torch.zeros(total, dtype=torch.bool).index_fill(0, chosen, True)
            yield is_chosen[groups].nonzero()[:, 0]
