"""Models that read samples: one for all samples, or several by data source."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megarl.batch import PromptList, Rollouts
from megarl.columns import int64
from megarl.distributed.sharded import Index

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True)
class PerDataSource(Generic[T]):
    """Readers of samples. The data source of its prompt decides which of them reads a sample."""

    named: Mapping[str, T] = field(default_factory=dict)
    other: T  # reads the samples of all other data sources

    def map(self, function: Callable[[T], U]) -> "PerDataSource[U]":
        """Return what `function` makes of each reader, as readers of the same data sources."""
        named = {source: function(reader) for source, reader in self.named.items()}
        return PerDataSource(named=named, other=function(self.other))

    def shares(self, batch: Rollouts | Index) -> list[tuple[T, Tensor]]:
        """Return the readers that have samples in `batch`, and the samples of each (int64 `[b]`, ascending)."""
        if not self.named:
            return [(self.other, torch.arange(len(batch)))] if len(batch) else []
        readers = [self.other, *self.named.values()]
        number = dict(zip(self.named, count(1), strict=False))
        groups, places = batch.groups.unique(return_inverse=True)
        source_of = PromptList.of(batch.prompts).source
        of_group = int64([number.get(source_of(group), 0) for group in groups.tolist()])
        of_sample = of_group[places]
        shares = [(of_sample == place).nonzero()[:, 0] for place in range(len(readers))]
        return [(reader, samples) for reader, samples in zip(readers, shares, strict=True) if len(samples)]
