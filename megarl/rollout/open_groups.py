"""The groups that a session draws, by number, with all their samples in one table."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from megarl.batch import Generation, Group, Prompt
from megarl.columns import Integers
from megarl.rollout.table import ROW, GroupRows, SampleRows, SampleTable
from megarl.rollout.window import Windows

GROUP = np.dtype(
    [
        ("number", np.int64),
        ("started", np.int64),  # finished steps when its first token was asked for
        ("first", np.int64),  # place of its first sample in the table
        ("count", np.int64),  # of its samples
        ("first_sample", np.int64),  # the number of its first sample
        ("num_left", np.int64),  # samples that are not complete
        ("is_open", np.bool_),
    ]
)


class OpenGroups:
    """The groups of a session, in the order in which they were added. A group is open until it is taken.

    The samples of a group have neighbouring numbers, so the place of a sample in the table follows from its number.
    """

    def __init__(self) -> None:
        self._table = SampleTable.of(())
        self._prompts: Sequence[Prompt] = ()
        self._groups = np.zeros(0, dtype=GROUP)
        self._place_of = np.zeros(0, dtype=np.int64)  # of a group by its number; -1: there is no such group

    @property
    def num_open(self) -> int:
        """The number of open groups."""
        return int(self._groups["is_open"].sum())

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

        added = np.zeros(len(numbers), dtype=GROUP)
        added["number"] = numbers
        added["started"] = groups.started.numpy()
        added["first"] = len(self._table) + firsts
        added["count"] = counts
        added["first_sample"] = samples[firsts]
        added["num_left"] = groups.num_incomplete()
        added["is_open"] = True
        grown = max(len(self._place_of), int(numbers.max(initial=-1)) + 1)
        self._place_of = np.append(self._place_of, np.full(grown - len(self._place_of), -1))
        self._place_of[numbers] = len(self._groups) + np.arange(len(numbers))
        self._prompts = [*self._prompts, *groups.prompts] if self._prompts else groups.prompts
        self._groups = np.append(self._groups, added)
        self._table = SampleTable.joined([self._table, table]) if len(self._table) else table

    def note(self, windows: Windows) -> None:
        """Put the samples of windows into their groups."""
        finished = windows.finished.numpy()
        places = self._place_of[finished[ROW["prompt"]]]
        groups = self._groups[places]
        rows = groups["first"] + finished[ROW["sample"]] - groups["first_sample"]
        numbers = self._table.numbers.numpy()
        is_new = finished[ROW["complete"]] > numbers[ROW["complete"], rows]
        np.subtract.at(self._groups["num_left"], places[is_new], 1)
        numbers[:, rows] = finished
        first = int(windows.counts[: windows.here, 0].sum())
        for row, sample in zip(rows[first:].tolist(), windows.mine.finished, strict=False):
            if isinstance(sample, Generation):
                self._table.own[row] = sample
                numbers[ROW["replica"], row] = Generation.replica

    def take_complete(self) -> list[int]:
        """Close the open groups whose samples are all complete, and return their numbers."""
        return self._take(self._groups["is_open"] & (self._groups["num_left"] == 0))

    def take_all(self) -> list[int]:
        """Close all open groups, and return their numbers."""
        return self._take(self._groups["is_open"].copy())

    def num_left(self, number: int) -> int:
        """Return how many samples of a group are not complete."""
        return int(self._groups["num_left"][self._place_of[number]])

    def is_here(self, number: int) -> bool:
        """Return whether this rank's replica has a sample of a group: another may have begun the rest."""
        samples = self._samples(self._place_of[number])
        replicas = self._table.column("replica")[samples.first : samples.last]
        return bool((replicas == Generation.replica).any())

    def group(self, number: int) -> Group:
        """Return a group, with the number of its prompt in the samples."""
        place = self._place_of[number]
        started = int(self._groups["started"][place])
        return Group(prompt=self._prompts[place], samples=self._samples(place), started=started)

    def everything(self) -> GroupRows:
        """Return all groups, in their order."""
        started = torch.from_numpy(self._groups["started"].copy())
        counts = torch.from_numpy(self._groups["count"].copy())
        return GroupRows(prompts=self._prompts, started=started, counts=counts, table=self._table)

    def _samples(self, place: int) -> SampleRows:
        first = int(self._groups["first"][place])
        return SampleRows(self._table, first, first + int(self._groups["count"][place]))

    def _take(self, chosen: npt.NDArray[np.bool_]) -> list[int]:
        self._groups["is_open"][chosen] = False
        numbers: list[int] = self._groups["number"][chosen].tolist()
        return numbers
