"""Samples that are spread over the data-parallel ranks: an index of all of them, and the share of this rank.

The index has a few numbers for each sample, and is equal on every rank. The share is a record with the tokens of this
rank's samples; ranks that hold shards of one model replica have the same share. So a rank holds only the tokens that it
learns from, and decisions about all samples follow from the index. After `redistribute` the share of a rank that does
not need all tokens has empty columns of tokens (`Need`): its pipeline stage computes neither losses nor statistics.

Invariant: what is computed of all samples does not depend on how they are spread. A number of a sample is computed from
its own tokens; `sum` adds such numbers of all ranks exactly, and `gather` brings them to all ranks, in the order of the
samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import ROWS, Prompt, PromptList, Rollouts
from megarl.columns import counted_from, spans_of_parts
from megarl.distributed.exchange import all_reduce, sum_of_ranks, to_first_rank, together
from megarl.distributed.made_prompts import redistribute_prompts
from megarl.distributed.runs import Runs
from megarl.distributed.sums import exact_sums, extremes

R_co = TypeVar("R_co", bound=Rollouts, covariant=True)
R = TypeVar("R", bound=Rollouts)
S = TypeVar("S", bound=Rollouts)
T = TypeVar("T")


class Need(Enum):
    """The tokens of its share that a rank takes."""

    ALL = auto()
    READ = auto()  # without the other columns
    NONE = auto()


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The shares of a batch: which ranks have which of them."""

    ranks: tuple[tuple[int, ...], ...] = ((0,),)  # of each share; the first of them reports and sends it
    rank: int = 0  # this rank
    group: dist.ProcessGroup | None = None  # the ranks of this rank's share, for data in host memory; None: all ranks
    needs: tuple[Need, ...] = ()  # of each rank, and `ALL` of a rank that reports; without any, each needs all

    @classmethod
    def of(cls, share: int, *, reports: bool) -> "Shares":
        """Return the shares of all ranks; this rank has `share`. Collective.

        `reports` is True on exactly one of the ranks that have the same share.
        """
        of_ranks = together(lambda: (share, not reports, dist.get_rank()))
        ranks: dict[int, list[int]] = {}
        for number, _, rank in sorted(of_ranks):
            ranks.setdefault(number, []).append(rank)
        return cls(ranks=tuple(map(tuple, ranks.values())), rank=dist.get_rank())

    @classmethod
    def blocks(cls, size: int, *, group: dist.ProcessGroup | None = None) -> "Shares":
        """Return the shares of blocks of `size` neighbouring ranks. `group` is that of this rank's block."""
        firsts = range(0, dist.get_world_size(), size)
        ranks = tuple(tuple(range(first, first + size)) for first in firsts)
        return cls(ranks=ranks, rank=dist.get_rank(), group=group)

    @classmethod
    def everywhere(cls) -> "Shares":
        """Return one share, which every rank has."""
        return cls.blocks(dist.get_world_size())

    @property
    def number(self) -> int:
        """The number of shares."""
        return len(self.ranks)

    @cached_property
    def here(self) -> int:
        """The share of this rank."""
        return next(share for share, ranks in enumerate(self.ranks) if self.rank in ranks)

    @property
    def reports(self) -> bool:
        """True on exactly one of the ranks that have the same share."""
        return self.ranks[self.here][0] == self.rank

    def need(self, rank: int) -> Need:
        """Return the tokens of its share that a rank takes."""
        return self.needs[rank] if self.needs else Need.ALL


@dataclass(frozen=True, kw_only=True)
class Index:
    """The numbers of all `B` samples that every rank knows."""

    prompts: Sequence[Prompt]  # length P
    runs: Runs  # the prompts, as positions in `prompts`, and the shares of the samples
    num_tokens: Tensor  # [B] int64: of the response
    num_learnt: Tensor  # [B] int64: tokens of the policy, which are learnt from
    truncated: Tensor  # [B] bool
    read_lengths: Tensor | None = None  # [B] int64: tokens that a model reads; None: those of prompt and response

    @classmethod
    def of(cls, record: Rollouts, owners: Tensor) -> "Index":
        """Return the index of a record that has all samples."""
        return cls(
            prompts=record.prompts,
            runs=Runs.of(record.groups, owners),
            num_tokens=record.num_tokens,
            num_learnt=record.num_learnt(),
            truncated=record.truncated,
            read_lengths=record.read_lengths,
        )

    def __len__(self) -> int:
        return len(self.num_tokens)

    @cached_property
    def groups(self) -> Tensor:
        """The prompt of each sample, a position in `prompts`: `[B]` int64."""
        return self.runs.on_samples(self.runs.groups)

    @cached_property
    def owners(self) -> Tensor:
        """The share that has each sample: `[B]` int64."""
        return self.runs.on_samples(self.runs.owners)

    @cached_property
    def lengths(self) -> Tensor:
        """The tokens of each sample, of prompt and response: `[B]` int64."""
        if self.read_lengths is not None:
            return self.read_lengths
        return self.runs.on_samples(self._prompt_lengths) + self.num_tokens

    @cached_property
    def run_lengths(self) -> Tensor:
        """The tokens of all samples of each run, of prompt and response: `[R]` int64."""
        if self.read_lengths is not None:
            return self.runs.sums(self.read_lengths)
        return self._prompt_lengths * self.runs.counts + self.runs.sums(self.num_tokens)

    @property
    def _prompt_lengths(self) -> Tensor:
        """The tokens of the prompt of each run: `[R]` int64."""
        lengths = PromptList.of(self.prompts).lengths
        has_all = self.runs.keep_groups and len(self.runs.groups) == len(lengths)
        return lengths if has_all else lengths[self.runs.groups]

    def select(self, samples: Tensor) -> "Index":
        """Return only the given samples (int64 indices `[K]`), in that order. Prompts are kept."""
        return Index(
            prompts=self.prompts,
            runs=Runs.of(self.groups[samples], self.owners[samples]),
            num_tokens=self.num_tokens[samples],
            num_learnt=self.num_learnt[samples],
            truncated=self.truncated[samples],
            read_lengths=None if self.read_lengths is None else self.read_lengths[samples],
        )


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
        return self.index.runs.places(self.shares.here)

    def local(self, samples: Tensor) -> Tensor:
        """Return the places in the share of those of the given samples (int64 indices `[K]`) that this rank has."""
        if len(samples) == len(self) and is_ascending(samples):
            return torch.arange(len(self.share))
        return self.own(samples[places_of(self.index.owners[samples], self.shares.here)])

    def own(self, samples: Tensor) -> Tensor:
        """Return the places in the share of given samples (int64 indices `[k]`). This rank must have all of them."""
        return torch.from_numpy(self.mine.numpy().searchsorted(samples.numpy()))

    def select(self, samples: Tensor) -> "Sharded[R_co]":
        """Return only the given samples (int64 indices `[K]`), in that order."""
        if len(samples) == len(self) and is_ascending(samples):
            return self
        return replace(self, index=self.index.select(samples), share=self.share.select(self.local(samples)))

    def of_prompts(self, places: Sequence[int]) -> "Sharded[R_co]":
        """Return only the prompts at `places`, ascending, with their samples."""
        number = torch.full((len(self.index.prompts),), -1)
        number[list(places)] = torch.arange(len(places))
        chosen = self.index.select((number[self.index.groups] >= 0).nonzero()[:, 0])
        runs = replace(chosen.runs, groups=number[chosen.runs.groups])
        index = replace(chosen, prompts=[self.index.prompts[place] for place in places], runs=runs)
        return replace(self, index=index, share=self.share.of_prompts(places))

    def tokens_of(self, samples: Tensor, column: Tensor) -> Tensor:
        """Return the part of a column `[n]` of the share that belongs to the given samples (int64 indices `[K]`)."""
        return self.share.tokens_of(self.local(samples), column)

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
            read_lengths=None if index.read_lengths is None else index.read_lengths - index.num_tokens * samples,
        )
        share = self.share.without_responses(samples[self.mine], self.index.num_tokens[self.mine])
        return replace(self, index=index, share=share)

    def first(self, count: int, found: Mapping[int, T]) -> dict[int, T]:
        """Return the first `count` objects of all ranks, by sample, on every rank. Collective.

        `found` are those of this rank, by the place of the sample in its share.
        """
        own = list[tuple[int, T]]()
        if self.shares.reports:
            mine = self.mine.tolist()
            own = [(mine[place], found[place]) for place in sorted(found)[:count]]
        if not sum_of_ranks(lambda: len(own)):
            return {}  # most steps: no objects are exchanged
        everywhere = chain.from_iterable(together(lambda: own))
        return dict(sorted(everywhere, key=itemgetter(0))[:count])

    def sum(self, numbers: Tensor) -> Tensor:
        """Return the sums of numbers of this rank's samples, `[b, ...]`, over all samples: `[...]` float64. Collective.

        They are as exact as `exact_sums`.
        """
        return exact_sums(numbers, counts=self.shares.reports)

    def extremes(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest and smallest of numbers of this rank's samples, `[b, ...]`, over all samples. Collective.

        Numbers of ranks that do not report are left out: outputs of a model are zeros before its last pipeline stage.
        """
        return extremes(numbers, counts=self.shares.reports)

    def marked(self, mine: Tensor) -> Tensor:
        """Bring marks of this rank's samples, bool `[b]`, to all ranks: bool `[B]`. Collective.

        Marks that all samples have alike cost a count.
        """
        number = int(self.sum(mine))
        if number in (0, len(self)):
            return torch.full((len(self),), number > 0)
        return self.gather(mine) > 0

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
        return counted_from((counts.cumsum(0) - counts)[self.mine], self.share.num_tokens)

    def _gather(self, numbers: Tensor, places: Tensor, total: int) -> Tensor:
        found = torch.zeros(total, *numbers.shape[1:], dtype=torch.float64)
        if self.shares.reports:
            found[places] = numbers.double()
        if dist.is_initialized():
            all_reduce(found)  # exactly one rank contributes each number
        return found

    def to_first_rank(self) -> R_co | None:
        """Bring the record of all samples, in their order and without routes, to the first rank. Collective.

        Other ranks return None.
        """
        runs = self.index.runs
        prompts = redistribute_prompts(self.index.prompts, runs.groups, torch.zeros_like(runs.groups), ranks=[[0]])
        share = replace(self.share, prompts=(), routes=None)
        parts = to_first_rank([(self.mine, share)] if self.shares.reports else [])
        return replace(assembled(parts), prompts=prompts) if parts else None


def is_ascending(places: Tensor) -> bool:
    """Return whether places, int64, ascend; then as many places as there are samples are all samples."""
    numbers = places.numpy()
    return bool((numbers[1:] > numbers[:-1]).all())


def places_of(owners: Tensor, share: int) -> Tensor:
    """Return the places of the samples of a share among all: int64, ascending. `owners` `[B]` are their shares."""
    return torch.from_numpy(np.flatnonzero(owners.numpy() == share))


def shard(record: R, owners: Tensor, shares: Shares) -> Sharded[R]:
    """Keep this rank's share of a record that every rank has.

    Args:
        record: `B` samples.
        owners: `[B]` int64, the share of each.
        shares: this rank's place.
    """
    mine = places_of(owners, shares.here)
    return Sharded(index=Index.of(record, owners), share=record.select(mine), shares=shares)


def assembled(parts: Sequence[tuple[Tensor, R]]) -> R:
    """Return the samples of several records that share their prompts, in the order of their places, int64 `[b]`.

    Places of a record are ascending.
    """
    filled = [part for part in parts if len(part[0])] or parts[:1]
    if len(filled) == 1:
        return filled[0][1]
    places, records = zip(*filled, strict=True)
    return merge(records, torch.cat(places).argsort())


def join_sharded(parts: Sequence[Sharded[R]]) -> Sharded[R]:
    """Join the prompts and samples of all `parts`, in their order. They have the same shares."""
    indices = [part.index for part in parts]
    starts = accumulate((len(index.prompts) for index in indices[:-1]), initial=0)
    groups = [index.runs.groups + start for index, start in zip(indices, starts, strict=True)]
    runs = Runs(
        groups=torch.cat(groups),
        owners=torch.cat([index.runs.owners for index in indices]),
        counts=torch.cat([index.runs.counts for index in indices]),
    )
    has_readers = any(index.read_lengths is not None for index in indices)
    index = Index(
        prompts=PromptList.joined(index.prompts for index in indices),
        runs=runs,
        num_tokens=torch.cat([index.num_tokens for index in indices]),
        num_learnt=torch.cat([index.num_learnt for index in indices]),
        truncated=torch.cat([index.truncated for index in indices]),
        read_lengths=torch.cat([index.lengths for index in indices]) if has_readers else None,
    )
    return Sharded(index=index, share=join([part.share for part in parts]), shares=parts[0].shares)


def join(parts: Sequence[R]) -> R:
    """Join the prompts and samples of all `parts`, in their order."""
    starts = accumulate((len(part.prompts) for part in parts[:-1]), initial=0)
    numbered = [replace(part, groups=part.groups + start) for part, start in zip(parts, starts, strict=True)]
    values = {field.name: [getattr(part, field.name) for part in numbered] for field in fields(parts[0])}
    return replace(parts[0], **{name: _joined(of_parts) for name, of_parts in values.items()})


def _joined(values: Sequence[Any]) -> Any:
    """Join the values that several records have in one field."""
    match values[0]:
        case None:
            return None
        case Tensor():
            return torch.cat(list(values))
        case PromptList():
            return PromptList.joined(values)
        case _:
            return [item for value in values for item in value]


def merge(parts: Sequence[R], order: Tensor) -> R:
    """Return the samples of all `parts`, which share their prompts. Each token is copied once.

    `order` has the place of each sample among those of all parts, end to end: int64 `[B]`, `B` at least 1.
    """
    sizes = [len(part) for part in parts]
    values: dict[str, Any] = {}
    rows = {mark: spans_of_parts(order, torch.cat([*map(ROWS[mark], parts)]), sizes) for mark in parts[0].marks()}
    for each in fields(parts[0]):
        columns = [getattr(part, each.name) for part in parts]
        if each.name == "prompts" or columns[0] is None:
            continue
        if each.metadata:
            [mark] = each.metadata
            values[each.name] = torch.cat([columns[part][span] for part, span in rows[mark]])
        else:
            joined = _joined(columns)
            values[each.name] = joined[order] if isinstance(joined, Tensor) else [joined[n] for n in order.tolist()]
    return replace(parts[0], **values)
