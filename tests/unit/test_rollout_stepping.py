"""Counted engine steps, if the engine schedules a step while the device computes the one before it."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.rollout.stepping import Stepper


class Engine:
    """An engine that draws a token of each request in a step, and returns it when `ahead` more steps are scheduled."""

    def __init__(self, ahead: int) -> None:
        self.queue = deque[list[str]]() if ahead else None
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=self.queue))
        self._ahead = ahead
        self._left = dict[str, int]()
        self._drawn = dict[str, int]()

    def add_request(self, name: str, prompt: Any, length: int) -> None:
        self._left[name], self._drawn[name] = length, 0

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self._left.pop(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[Any]:
        if self.queue is None:
            return self._outputs(list(self._left))
        if self._left or not self.queue:
            self.queue.append(list(self._left))
            if len(self.queue) <= self._ahead and self._left:
                return []
        return self._outputs(self.queue.popleft())

    def _outputs(self, names: list[str]) -> list[Any]:
        outputs = []
        for name in names:
            if name in self._left:
                self._drawn[name] += 1
                is_last = self._drawn[name] == self._left[name]
                outputs.append(SimpleNamespace(request_id=name, finished=is_last, number=self._drawn[name]))
                if is_last:
                    del self._left[name]
        return outputs


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_is_counted_when_its_tokens_are_there(ahead: int) -> None:
    engine = Engine(ahead)
    stepper = Stepper(engine)
    for length in (2, 9, 9):
        stepper.add([1], length)
    assert [[output.request_id for output in stepper.step()] for _ in range(3)] == [[], ["0"], []]
    assert {name: output.number for name, output in stepper.stop().items()} == {"1": 3, "2": 3}
    assert not engine.queue


@pytest.mark.parametrize("ahead", [0, 1])
def test_requests_begin_with_no_step_of_earlier_ones(ahead: int) -> None:
    engine = Engine(ahead)
    stepper = Stepper(engine)
    for _ in range(2):
        name = stepper.add([1], 3)
        steps = [stepper.step() for _ in range(3)]
        assert [[output.request_id for output in finished] for finished in steps] == [[], [], [name]]
        assert not engine.queue
