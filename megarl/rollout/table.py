"""The samples of all replicas as every rank has them: a few numbers of each, in columns.

The samples of this rank's replica have tokens too, as objects. Samples of other replicas become objects only if someone
asks for them, so the work of a rank for each of them is that of numpy.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from megarl.batch import Generation, Group, Prompt, RemoteSample, Sample, float32, int32
from megarl.columns import Integers, int64
from megarl.on_demand import OnDemand

FIELDS = RemoteSample._fields
ROW = {name: row for row, name in enumerate(FIELDS)}
_fields_of = attrgetter(*FIELDS)


@dataclass
class SampleTable:
    """The samples of groups, by place: group by group, and in a group by their numbers."""

    numbers: Tensor  # [9, B] int32: the fields of `RemoteSample`; the replica of samples of this rank is -1
    own: dict[int, Generation] = field(default_factory=dict)  # by place; it means nothing if the replica is not -1

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "SampleTable":
        """Return the table of given samples."""
        fields = chain.from_iterable(map(_fields_of, samples))
        numbers = np.fromiter(fields, dtype=np.int32, count=len(samples) * len(FIELDS)).reshape(-1, len(FIELDS))
        own = {
            place: sample
            for place, sample in enumerate(samples)
            if isinstance(sample, Generation) and (sample.token_ids or sample.complete)
        }
        return cls(torch.from_numpy(np.ascontiguousarray(numbers.T)), own)

    @classmethod
    def blank(cls, groups: int, samples: Sequence[int]) -> "SampleTable":
        """Return the table of `groups` with samples of these numbers, all without tokens."""
        numbers = torch.zeros(len(FIELDS), groups * len(samples), dtype=torch.int32)
        numbers[ROW["sample"]] = torch.tensor(samples).repeat(groups)
        numbers[ROW["replica"]] = Generation.replica
        numbers[ROW["has_log_probs"]] = 1
        return cls(numbers)

    @classmethod
    def joined(cls, parts: Sequence["SampleTable"]) -> "SampleTable":
        """Return one table of the samples of all parts, in their order."""
        if len(parts) < 2:
            return parts[0] if parts else cls.of(())
        own: dict[int, Generation] = {}
        start = 0
        for part in parts:
            own |= {start + place: sample for place, sample in part.own.items()}
            start += len(part)
        return cls(torch.cat([part.numbers for part in parts], dim=1), own)

    def __len__(self) -> int:
        return self.numbers.shape[1]

    def column(self, name: str) -> Tensor:
        """Return a field of `RemoteSample` of each sample: `[B]` int32, a view."""
        return self.numbers[ROW[name]]

    def mine(self) -> Tensor:
        """Return the places of the samples that have tokens on this rank, or are complete here: int64, ascending."""
        places = np.sort(np.fromiter(self.own, dtype=np.int64, count=len(self.own)))
        return torch.from_numpy(places[self.column("replica").numpy()[places] == Generation.replica])

    def part(self, first: int, last: int) -> "SampleTable":
        """Return the samples from `first` to before `last`; the numbers are a view."""
        if (first, last) == (0, len(self)):
            return self
        found = range(first, last) if last - first < len(self.own) else self.own
        own = {place - first: self.own[place] for place in found if place in self.own and first <= place < last}
        return SampleTable(self.numbers[:, first:last], own)

    def sample(self, place: int) -> Sample:
        """Return a sample. A sample without tokens may still be drawn here."""
        known = RemoteSample(*self.numbers[:, place].tolist())
        has_log_probs = bool(known.has_log_probs)
        if known.replica != Generation.replica:
            return known._replace(
                has_log_probs=has_log_probs, truncated=bool(known.truncated), complete=bool(known.complete)
            )
        log_probs = float32() if has_log_probs else None
        blank = Generation(known.prompt, int32(), log_probs, truncated=False, sample=known.sample, complete=False)
        return self.own.get(place, blank)


@dataclass(frozen=True, eq=False, repr=False)
class SampleRows(OnDemand[Sample]):
    """Neighbouring samples of a table, which become objects if they are asked for."""

    table: SampleTable
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def make_item(self, place: int) -> Sample:
        """Return a sample."""
        return self.table.sample(self.first + place)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupRows(OnDemand[Group]):
    """Groups whose samples are in one table. The same on every rank, except for the tokens."""

    prompts: Sequence[Prompt]  # length P
    started: Tensor  # [P] int64: finished steps when the first token of the group was asked for
    counts: Tensor  # [P] int64: samples of the group
    table: SampleTable

    @classmethod
    def of(cls, groups: Sequence[Group]) -> "GroupRows":
        """Return given groups in one table."""
        if isinstance(groups, GroupRows):
            return groups
        return cls(
            prompts=[group.prompt for group in groups],
            started=int64([group.started for group in groups]),
            counts=int64([len(group.samples) for group in groups]),
            table=SampleTable.joined([*_tables(group.samples for group in groups)]),
        )

    @classmethod
    def new(cls, prompts: Sequence[Prompt], numbers: Sequence[int], *, started: int) -> "GroupRows":
        """Return a group of samples of these numbers, without tokens, of each prompt."""
        return cls(
            prompts=prompts,
            started=torch.full((len(prompts),), started),
            counts=torch.full((len(prompts),), len(numbers)),
            table=SampleTable.blank(len(prompts), numbers),
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def make_item(self, place: int) -> Group:
        """Return a group, with its samples as rows of the table."""
        last = int(self.ends[place])
        samples = SampleRows(self.table, last - int(self.counts[place]), last)
        return Group(prompt=self.prompts[place], samples=samples, started=int(self.started[place]))

    def num_incomplete(self) -> Integers:
        """Return the number of samples of each group that are not complete: `[P]`."""
        is_open = self.table.column("complete").numpy() == 0
        return np.bincount(np.repeat(np.arange(len(self)), self.counts.numpy())[is_open], minlength=len(self))

    def replicas(self, here: int) -> Integers:
        """Return the replica that has tokens of the incomplete samples of each group: `[P]`; -1: there are none.

        `here` is this rank's replica.
        """
        table = self.table
        is_begun = (table.column("complete") == 0) & (table.column("num_tokens") > 0)
        places = np.flatnonzero(is_begun.numpy())[::-1]  # of several samples, the first counts
        replicas = table.column("replica").numpy()[places]
        found = np.full(len(self), -1)
        found[self.ends.numpy().searchsorted(places, side="right")] = np.where(
            replicas == Generation.replica, here, replicas
        )
        return found

    @cached_property
    def ends(self) -> Tensor:
        """The place after the last sample of each group: `[P]` int64."""
        return self.counts.cumsum(0)


def _tables(of_groups: Iterable[Sequence[Sample]]) -> Iterator[SampleTable]:
    """Yield tables of the samples of groups, in their order. Neighbours in one table stay together."""
    for _, neighbours in groupby(of_groups, lambda samples: isinstance(samples, SampleRows) and id(samples.table)):
        parts = list(neighbours)
        known = [part for part in parts if isinstance(part, SampleRows)]
        if not known:
            yield SampleTable.of(list(chain.from_iterable(parts)))
            continue
        first = 0
        for place, part in enumerate(known, 1):
            if place == len(known) or known[place].first != part.last:
                yield part.table.part(known[first].first, part.last)
                first = place
