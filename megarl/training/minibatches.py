"""The global mini-batches of a step: a seeded permutation of its prompts, cut into equal parts."""

from collections.abc import Iterator
from typing import TypeVar

import torch

from megarl.batch import Rollouts

R = TypeVar("R", bound=Rollouts)


def minibatches(batch: R, *, num_prompts: int, num_epochs: int, shuffle: bool, seed: int) -> Iterator[R]:
    """Yield mini-batches of `num_prompts` prompts with all their samples, `num_epochs` times over `batch`.

    The order is a pure function of `seed`, the same on every rank; each epoch has its own. The last mini-batch of an
    epoch is smaller if `num_prompts` does not divide the number of prompts.
    """
    generator = torch.Generator().manual_seed(seed)
    total = len(batch.prompts)
    for _ in range(num_epochs):
        order = torch.randperm(total, generator=generator) if shuffle else torch.arange(total)
        for chosen in order.split(num_prompts):
            yield batch.select(torch.isin(batch.groups, chosen).nonzero()[:, 0])
