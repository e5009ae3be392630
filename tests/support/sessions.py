"""A session by hand: groups become complete after a chosen number of exchanges."""

from collections.abc import Callable
from dataclasses import replace

from megarl.batch import Generation, Group, int32

Answer = Callable[[Group], Group]


class HandSession:
    """The groups of a step, which `answer` completes `wait(number)` exchanges after they were added."""

    def __init__(self, answer: Answer, wait: Callable[[int], int] = lambda number: 1) -> None:
        self._answer, self._wait = answer, wait
        self._open = dict[int, tuple[int, Group]]()  # number -> exchanges left, group
        self.added: list[list[int]] = []  # the numbers of each call
        self.num_exchanges = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, groups: dict[int, Group]) -> None:
        if groups:
            self.added.append(list(groups))
        self._open |= {number: (self._wait(number), group) for number, group in groups.items()}

    def advance(self) -> dict[int, Group]:
        self.num_exchanges += 1
        left = {number: (waits - 1, group) for number, (waits, group) in self._open.items()}
        self._open = {number: (waits, group) for number, (waits, group) in left.items() if waits > 0}
        return {number: self._answer(group) for number, (waits, group) in left.items() if waits <= 0}

    def stop(self) -> dict[int, Group]:
        stopped, self._open = self._open, {}
        return {number: group for number, (_, group) in stopped.items()}

    def occupancy(self) -> float:
        return 0.75


def answered(group: Group, tokens: Callable[[int], list[int]], *, version: int = 0) -> Group:
    """Complete the group: the response of sample `s` has the tokens `tokens(s)`, drawn by weights of `version`."""

    def complete(sample: Generation) -> Generation:
        new = int32(tokens(sample.sample))
        drawn = Generation(0, new, None, truncated=False, weight_versions=int32([version]) * len(new))
        return sample.then(drawn)

    return replace(group, samples=tuple(complete(sample) for sample in group.samples))
