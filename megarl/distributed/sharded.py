"""Samples that are spread over the data-parallel ranks: an index of all of them, and the share of this rank.

The index has a few numbers for each sample, and is equal on every rank. The share is a record with the tokens of this
rank's samples; ranks that hold shards of one model replica have the same share. So a rank holds only the tokens that it
learns from, and decisions about all samples follow from the index.

Invariant: what is computed of all samples does not depend on how they are spread. A number of a sample is computed from
its own tokens; `gather` brings it to all ranks, which add such numbers in the order of the samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Prompt, Rollouts, counted_from, join
from megarl.distributed.exchange import host_group, together

R_co = TypeVar("R_co", bound=Rollouts, covariant=True)
R = TypeVar("R", bound=Rollouts)
S = TypeVar("S", bound=Rollouts)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The shares of a batch, one for each data-parallel rank, and this rank's place among them."""

    number: int = 1
    here: int = 0  # this rank's share
    reports: bool = True  # True on exactly one of the ranks that have the same share


@dataclass(frozen=True, kw_only=True)
class Index:
    """The numbers of all `B` samples that every rank knows."""

    prompts: Sequence[Prompt]  # length P
    groups: Tensor  # [B] int64: the sample's prompt, a position in `prompts`
    owners: Tensor  # [B] int64: the share that has the sample
    num_tokens: Tensor  # [B] int64: of the response
    num_learnt: Tensor  # [B] int64: tokens of the policy, which are learnt from
    lengths: Tensor  # [B] int64: tokens of prompt and response
    truncated: Tensor  # [B] bool

    @classmethod
    def of(cls, record: Rollouts, owners: Tensor) -> "Index":
        """Return the index of a record that has all samples."""
        return cls(
            prompts=record.prompts,
            groups=record.groups,
            owners=owners,
            num_tokens=record.num_tokens,
            num_learnt=record.num_learnt(),
            lengths=record.lengths(),
            truncated=record.truncated,
        )

    def __len__(self) -> int:
        return len(self.owners)

    def select(self, samples: Tensor) -> "Index":
        """Return only the given samples (int64 indices `[K]`), in that order. Prompts are kept."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        chosen = {name: value[samples] for name, value in values.items() if isinstance(value, Tensor)}
        return Index(**values | chosen)


@dataclass(frozen=True, kw_only=True)
class Sharded(Generic[R_co]):
    """The samples of a step or of a mini-batch: the index of all `B`, and the share of this rank."""

    index: Index
    share: R_co  # the `b` samples that this rank has, in their order
    shares: Shares

    def __len__(self) -> int:
        return len(self.index)

    @property
    def mine(self) -> Tensor:
        """The places of this rank's samples among all: int64 `[b]`, ascending."""
        return (self.index.owners == self.shares.here).nonzero()[:, 0]

    def local(self, samples: Tensor) -> Tensor:
        """Return the places in the share of those of the given samples (int64 indices `[K]`) that this rank has."""
        place = torch.full((len(self),), -1)
        place[self.mine] = torch.arange(len(self.share))
        found = place[samples]
        return found[found >= 0]

    def select(self, samples: Tensor) -> "Sharded[R_co]":
        """Return only the given samples (int64 indices `[K]`), in that order."""
        return replace(self, index=self.index.select(samples), share=self.share.select(self.local(samples)))

    def token_places(self, samples: Tensor) -> Tensor:
        """Return the places in the share's columns of the given samples' tokens, as far as this rank has them."""
        return self.share.token_places(self.local(samples))

    def with_share(self, share: S) -> "Sharded[S]":
        """Return the same samples with another record of this rank's."""
        return Sharded(index=self.index, share=share, shares=self.shares)

    def without_responses(self, samples: Tensor) -> "Sharded[R_co]":
        """Remove the response tokens of the given samples (bool `[B]`), so that nothing learns from them."""
        index = self.index
        index = replace(
            index,
            num_tokens=index.num_tokens * ~samples,
            num_learnt=index.num_learnt * ~samples,
            lengths=index.lengths - index.num_tokens * samples,
        )
        return replace(self, index=index, share=self.share.without_responses(samples[self.mine]))

    def gather(self, numbers: Tensor) -> Tensor:
        """Bring numbers of this rank's samples, `[b, ...]`, to all ranks: `[B, ...]` float64. Collective."""
        return self._gather(numbers, self.mine, len(self))

    def gather_tokens(self, column: Tensor) -> Tensor:
        """Bring a column of this rank's tokens, `[n]`, to all ranks: `[N]` float64. Collective.

        It costs every rank the memory of all tokens: for small batches, and for functions that need all tokens.
        """
        return self._gather(column, self._places(), int(self.index.num_tokens.sum()))

    def share_of(self, column: Tensor) -> Tensor:
        """Return this rank's tokens, `[n]`, of a column of all tokens, `[N]`."""
        return column[self._places()]

    def _places(self) -> Tensor:
        """Return the places of this rank's tokens among all: `[n]` int64."""
        counts = self.index.num_tokens
        return counted_from((counts.cumsum(0) - counts)[self.mine], counts[self.mine])

    def _gather(self, numbers: Tensor, places: Tensor, total: int) -> Tensor:
        found = torch.zeros(total, *numbers.shape[1:], dtype=torch.float64)
        if self.shares.reports:
            found[places] = numbers.double()
        if dist.is_initialized():
            dist.all_reduce(found, group=host_group())  # exactly one rank contributes each number
        return found

    def whole(self) -> R_co:
        """Return the record of all samples, in their order, on every rank. Collective.

        It costs every rank the memory of all tokens.
        """
        parts = together(lambda: (self.mine, self.share) if self.shares.reports else None)
        rows, records = zip(*(part for part in parts if part), strict=True)
        record = join([replace(each, prompts=[]) for each in records])
        groups = torch.cat([each.groups for each in records])
        everything = replace(record, prompts=self.share.prompts, groups=groups)
        return everything.select(torch.cat(rows).argsort())


def shard(record: R, owners: Tensor, shares: Shares) -> Sharded[R]:
    """Keep this rank's share of a record that every rank has.

    Args:
        record: `B` samples.
        owners: `[B]` int64, the share of each.
        shares: this rank's place.
    """
    mine = (owners == shares.here).nonzero()[:, 0]
    return Sharded(index=Index.of(record, owners), share=record.select(mine), shares=shares)
