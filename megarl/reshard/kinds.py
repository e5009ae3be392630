"""The kinds of parameters, which share everything that is computed from their holdings."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from megarl.columns import Integers
from megarl.reshard.columns import starts
from megarl.reshard.layout import Placement, ShardedBoxes

Times = npt.NDArray[np.float64]
ALL_OWNERS = -1
ShardingPattern = tuple[ShardedBoxes, ShardedBoxes]  # on the side of the source, and of the destination


class ShardingPatterns:
    """The kinds of parameters. Parameters of a kind have equal holdings on both sides, and so the same moves."""

    def __init__(self, source: Placement, destination: Placement) -> None:
        nobody = ShardedBoxes((), torch.float64)
        number: dict[ShardingPattern, int] = {}
        kind_of = []
        for name, demand in destination.items():
            kind = (source.get(name, nobody), demand)
            kind_of.append(number.setdefault(kind, len(number)))
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
        owner = np.where(is_shared, ALL_OWNERS, owners)[self.kind_of]
        stage = stages[self.kind_of]
        amount = load[self.kind_of]
        begin = np.empty(len(stage))
        duration = np.empty(len(stage))
        for number in range(max(stages) + 1):
            params = np.flatnonzero(stage == number)
            before, total = _in_turn(owner[params], amount[params])
            begin[params] = before / total
            duration[params] = amount[params] / total
        return begin, duration


def _in_turn(owner: Integers, amount: Integers) -> tuple[Times, int]:
    """Return what a rank of a stage has sent before each of the stage's parameters, and what it sends in sum."""
    before = np.empty(len(owner))
    sent = 0
    is_shared = owner == ALL_OWNERS
    for run in np.split(np.arange(len(owner)), np.flatnonzero(np.diff(is_shared)) + 1):
        by_owner = run[np.argsort(owner[run], kind="stable")]
        of_owners = []
        for params in np.split(by_owner, np.flatnonzero(np.diff(owner[by_owner])) + 1):
            before[params] = sent + starts(amount[params])
            of_owners.append(int(amount[params].sum()))
        sent += max(of_owners)
    return before, sent


def _owners(sources: Sequence[ShardedBoxes]) -> tuple[Integers, Integers, npt.NDArray[np.bool_]]:
    """Return for each source the number of its set of ranks (owner), its stage, and whether it spans its stage.

    A stage is the union of owners that overlap.
    """
    ranks_of: dict[ShardedBoxes, frozenset[int]] = {}
    for source in dict.fromkeys(sources):
        ranks_of[source] = frozenset(rank for place in source.places for rank in place.ranks)
    owners = list(dict.fromkeys(ranks_of.values()))
    stages: list[set[int]] = []  # disjoint
    for owner in owners:
        touched = [stage for stage in stages if not stage.isdisjoint(owner)]
        stages = [stage for stage in stages if stage.isdisjoint(owner)]
        stages.append(set(owner).union(*touched))
    stage_of = {rank: number for number, stage in enumerate(stages) for rank in stage}
    number_of = {owner: number for number, owner in enumerate(owners)}
    owner_of_source = []
    stage_of_source = []
    is_shared = []
    for source in sources:
        ranks = ranks_of[source]
        stage = stage_of[min(ranks)]
        owner_of_source.append(number_of[ranks])
        stage_of_source.append(stage)
        is_shared.append(len(ranks) == len(stages[stage]))
    return np.array(owner_of_source), np.array(stage_of_source), np.array(is_shared)
