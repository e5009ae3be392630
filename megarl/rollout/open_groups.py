"""The groups that a session draws, by number, with all their samples in one table."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from megarl.batch import Generation, Group, Prompt
from megarl.columns import Integers
from megarl.rollout.table import ROW, GroupRows, SampleRows, SampleTable
from megarl.rollout.window import Windows


class OpenGroups:
    """The groups of a session, in the order in which they were added. A group is open until it is taken.

    The samples of a group have neighbouring numbers, so the place of a sample in the table follows from its number.
    """

    def __init__(self) -> None:
        nothing = np.zeros(0, dtype=np.int64)
        self._table = SampleTable.of(())
        self._prompts: Sequence[Prompt] = ()
        self._numbers = nothing  # of each group
        self._place_of = nothing  # of a group by its number; -1: there is no such group
        self._started = nothing
        self._firsts = nothing  # places of the first samples
        self._counts = nothing
        self._least = nothing  # numbers of the first samples
        self._left = nothing  # samples that are not complete
        self._is_open = np.zeros(0, dtype=bool)

    @property
    def num_open(self) -> int:
        """The number of open groups."""
        return int(self._is_open.sum())

    def add(self, numbers: Integers, groups: GroupRows) -> None:
        """Open groups of these numbers. Their samples get the number of the group as that of their prompt."""
        counts = groups.counts.numpy()
        table = SampleTable(groups.table.numbers.clone())
        of_samples = np.repeat(numbers, counts)
        table.numbers[ROW["prompt"]] = torch.from_numpy(of_samples)
        table.own |= {place: each.of_prompt(int(of_samples[place])) for place, each in groups.table.own.items()}
        firsts = counts.cumsum() - counts
        samples = table.column("sample").numpy()
        assert (samples - np.repeat(samples[firsts] - firsts, counts) == np.arange(len(table))).all(), "missing samples"

        size = len(self._numbers)
        grown = max(len(self._place_of), int(numbers.max(initial=-1)) + 1)
        self._place_of = np.append(self._place_of, np.full(grown - len(self._place_of), -1))
        self._place_of[numbers] = size + np.arange(len(numbers))
        self._prompts = [*self._prompts, *groups.prompts] if self._prompts else groups.prompts
        self._numbers = np.append(self._numbers, numbers)
        self._started = np.append(self._started, groups.started.numpy())
        self._firsts = np.append(self._firsts, len(self._table) + firsts)
        self._counts = np.append(self._counts, counts)
        self._least = np.append(self._least, samples[firsts])
        self._left = np.append(self._left, groups.num_incomplete())
        self._is_open = np.append(self._is_open, np.ones(len(numbers), dtype=bool))
        self._table = SampleTable.joined([self._table, table]) if len(self._table) else table

    def note(self, windows: Windows) -> None:
        """Put the samples of windows into their groups."""
        told = windows.finished.numpy()
        groups = self._place_of[told[ROW["prompt"]]]
        places = self._firsts[groups] + told[ROW["sample"]] - self._least[groups]
        numbers = self._table.numbers.numpy()
        is_new = told[ROW["complete"]] > numbers[ROW["complete"], places]
        np.subtract.at(self._left, groups[is_new], 1)
        numbers[:, places] = told
        first = int(windows.counts[: windows.here, 0].sum())
        for place, sample in zip(places[first:].tolist(), windows.mine.finished, strict=False):
            if isinstance(sample, Generation):
                self._table.own[place] = sample
                numbers[ROW["replica"], place] = Generation.replica

    def take_complete(self) -> list[int]:
        """Close the open groups whose samples are all complete, and return their numbers."""
        return self._take(self._is_open & (self._left == 0))

    def take_all(self) -> list[int]:
        """Close all open groups, and return their numbers."""
        return self._take(self._is_open.copy())

    def num_left(self, number: int) -> int:
        """Return how many samples of a group are not complete."""
        return int(self._left[self._place_of[number]])

    def is_here(self, number: int) -> bool:
        """Return whether this rank's replica has a sample of a group: another may have begun the rest."""
        place = self._place_of[number]
        first = int(self._firsts[place])
        replicas = self._table.column("replica")[first : first + int(self._counts[place])]
        return bool((replicas == Generation.replica).any())

    def group(self, number: int) -> Group:
        """Return a group, with the number of its prompt in the samples."""
        place = self._place_of[number]
        first = int(self._firsts[place])
        count = int(self._counts[place])
        samples = SampleRows(self._table, first, first + count)
        return Group(prompt=self._prompts[place], samples=samples, started=int(self._started[place]))

    def everything(self) -> GroupRows:
        """Return all groups, in their order."""
        started = torch.from_numpy(self._started)
        counts = torch.from_numpy(self._counts)
        return GroupRows(prompts=self._prompts, started=started, counts=counts, table=self._table)

    def _take(self, chosen: npt.NDArray[np.bool_]) -> list[int]:
        self._is_open[chosen] = False
        numbers: list[int] = self._numbers[chosen].tolist()
        return numbers
