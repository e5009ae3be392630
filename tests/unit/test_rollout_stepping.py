"""Counted engine steps, if the engine schedules a step while the device computes the one before it."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from megarl.rollout.stepping import Stepper


class Engine:
    """An engine that draws a token of each request in a step, and returns it when `ahead` more steps are scheduled."""

    def __init__(self, ahead: int, room: int = 9) -> None:
        self.queue = deque[list[str]]() if ahead else None
        self.requests = dict[str, Any]()
        scheduler = SimpleNamespace(requests=self.requests)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=self.queue, scheduler=scheduler))
        self._ahead, self._room = ahead, room
        self._left = dict[str, int]()
        self._drawn = dict[str, int]()

    def add_request(self, name: str, prompt: Any, length: int) -> None:
        self._left[name], self._drawn[name] = length, 0
        self.requests[name] = SimpleNamespace(request_id=f"{name}-0ba5eba1", status=RequestStatus.WAITING)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self._left[name], self.requests[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[Any]:
        if self.queue is None:
            return self._outputs(self._scheduled())
        if self._left or not self.queue:
            self.queue.append(self._scheduled())
            if len(self.queue) <= self._ahead and self._left:
                return []
        return self._outputs(self.queue.popleft())

    def _scheduled(self) -> list[str]:
        names = list(self._left)[: self._room]
        for name in names:
            self.requests[name].status = RequestStatus.RUNNING
        return names

    def _outputs(self, names: list[str]) -> list[Any]:
        outputs = []
        for name in names:
            if name in self._left:
                self._drawn[name] += 1
                is_last = self._drawn[name] == self._left[name]
                outputs.append(SimpleNamespace(request_id=name, finished=is_last, number=self._drawn[name]))
                if is_last:
                    del self._left[name], self.requests[name]
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


@pytest.mark.parametrize("ahead", [0, 1])
def test_requests_without_room_wait_and_can_be_withdrawn(ahead: int) -> None:
    engine = Engine(ahead, room=2)
    stepper = Stepper(engine)
    names = [stepper.add([1], 3) for _ in range(5)]
    assert stepper.waiting() == names
    stepper.step()
    assert stepper.waiting() == names[2:]
    stepper.withdraw([names[3], names[2]])
    assert stepper.waiting() == [names[4]]
    finished = [output.request_id for _ in range(5 + ahead) for output in stepper.step()]
    assert finished == [names[0], names[1], names[4]]
    assert stepper.waiting() == []
