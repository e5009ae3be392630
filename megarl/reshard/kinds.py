"""The kinds of parameters, which share everything that is computed from their holdings."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from megarl.reshard.columns import starts
from megarl.reshard.layout import Integers, Placement, ShardedBoxes

Times = npt.NDArray[np.float64]
ShardingPattern = tuple[ShardedBoxes, ShardedBoxes]  # on the side of the source, and of the destination


class ShardingPatterns:
    """The kinds of parameters. Parameters of a kind have equal holdings on both sides, and so the same routes."""

    def __init__(self, source: Placement, destination: Placement) -> None:
        nobody = ShardedBoxes((), torch.float64)
        number: dict[ShardingPattern, int] = {}
        kind_of = [
            number.setdefault((source.get(name, nobody), demand), len(number)) for name, demand in destination.items()
        ]
        self.boxes = list(number)
        self.kind_of = np.array(kind_of, dtype=np.int64)  # [num_params]
        self.num_params = np.bincount(self.kind_of, minlength=len(number)).tolist()  # [num_kinds]
        self._names = list(destination)

    def example(self, kind: int) -> str:
        """Return the first parameter of a kind."""
        return self._names[int(np.flatnonzero(self.kind_of == kind)[0])]

    def timetable(self, load: Integers) -> tuple[Times, Times]:
        """Return when each parameter would begin to travel, and for how long, if all ranks sent at full speed.

        Owners with ranks in common (the expert groups of a pipeline stage) form a stage. Each stage sends its
        parameters in order: those of all its ranks one after the other, and between them those of its different owners
        at the same time. All stages start at time 0 and end at time 1.

        Args:
            load: [num_kinds], the most that a rank has to send of such a parameter, in any unit.

        Returns:
            begin and duration, both [num_params].
        """
        if not self.boxes:
            return np.zeros(0), np.zeros(0)
        owners, stages, is_shared = _owners([supply for supply, _ in self.boxes])
        stage, shared, amount = (np.array(column)[self.kind_of] for column in (stages, is_shared, load))
        owner = np.where(shared, -1, np.array(owners)[self.kind_of])
        by_stage = np.argsort(stage, kind="stable")
        begin = np.empty(len(stage))
        duration = np.empty(len(stage))
        for members in np.split(by_stage, np.cumsum(np.bincount(stage))[:-1]):
            run_starts = np.flatnonzero(np.diff(shared[members], prepend=~shared[members[:1]]))
            now = 0.0
            for run in np.split(members, run_starts[1:]):
                order = run[np.argsort(owner[run], kind="stable")]
                before = starts(amount[order])  # sent before, by all owners of the run
                first = np.flatnonzero(np.diff(owner[order], prepend=-2))  # param of each owner
                before -= np.repeat(before[first], np.diff(first, append=len(order)))  # by the same owner alone
                begin[order] = now + before
                now += (before + amount[order]).max()
            begin[members] /= now
            duration[members] = amount[members] / now
        return begin, duration


def _owners(sources: Sequence[ShardedBoxes]) -> tuple[list[int], list[int], list[bool]]:
    """Return for each source the number of its set of ranks (owner), its stage, and whether it spans its stage.

    A stage is the union of owners that overlap.
    """
    ranks_of: dict[ShardedBoxes, frozenset[int]] = {}
    for source in sources:
        if source not in ranks_of:
            ranks_of[source] = frozenset(rank for place in source.places for rank in place.ranks)
    groups = list(dict.fromkeys(ranks_of.values()))
    number = {group: index for index, group in enumerate(groups)}
    spans: list[set[int]] = []  # disjoint
    for group in groups:
        touched = [span for span in spans if not span.isdisjoint(group)]
        spans = [span for span in spans if span.isdisjoint(group)] + [set(group).union(*touched)]
    stage_of = {rank: stage for stage, span in enumerate(spans) for rank in span}
    of_source = [ranks_of[source] for source in sources]
    stages = [stage_of[min(group)] for group in of_source]
    is_shared = [len(group) == len(spans[stage]) for group, stage in zip(of_source, stages, strict=True)]
    return [number[group] for group in of_source], stages, is_shared
