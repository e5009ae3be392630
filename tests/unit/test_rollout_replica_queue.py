"""Counted engine steps, if the engine schedules a step while the device computes the one before it."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from megarl.platform import progress
from megarl.batch import Group, Prompt
from megarl.rollout.replica_queue import Replica, ReplicaQueue
from megarl.rollout.session import SamplingSession
from tests.support.replicas import Replicas

REPLICA = Replica(name="engine replica 0", tp_rank=0, tp_size=1, num_slots=9, may_compile=True)


class Params:
    """The parameter of a request is the length of its response: the number of its row."""

    def of(self, request: Any) -> int:
        return int(request.prompt.index)


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
        self.requests[name] = SimpleNamespace(
            request_id=f"{name}-0ba5eba1", status=RequestStatus.WAITING, prompt=prompt["prompt_token_ids"]
        )

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
                outputs.append(self._output(name, is_last=self._drawn[name] == self._left[name]))
        return outputs

    def _output(self, name: str, *, is_last: bool) -> Any:
        prompt = self.requests[name].prompt
        if is_last:
            del self._left[name], self.requests[name]
        tokens = [1] * self._drawn[name]
        sample = SimpleNamespace(token_ids=tokens, logprobs=None, finish_reason="stop" if is_last else None)
        return SimpleNamespace(
            request_id=name, prompt_token_ids=prompt, outputs=[sample], finished=is_last, num_cached_tokens=0
        )


def queue_of(engine: Engine, **options: Any) -> ReplicaQueue:
    return ReplicaQueue(engine, Params(), REPLICA, step=0, weight_version=0, **options)  # type: ignore[arg-type]


def groups(*lengths: int, samples: int = 1, first: int = 0) -> list[Group]:
    """Return groups of responses of these lengths, numbered from `first`."""
    prompts = [
        Prompt(index=length, token_ids=[1], text="", data_source="", ground_truth=None, extra_info={})
        for length in lengths
    ]
    return [Group.new(prompt, range(samples), started=0, place=place) for place, prompt in enumerate(prompts, first)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_step_counts_when_its_tokens_arrive(ahead: int) -> None:
    engine = Engine(ahead)
    queue = queue_of(engine)
    queue.add(groups(2, 9, 9))
    assert [[drawn.prompt for drawn in queue.run(1)] for _ in range(3)] == [[], [0], []]
    assert [(drawn.prompt, len(drawn.token_ids)) for drawn in queue.stop()] == [(1, 3), (2, 3)]
    assert not engine.queue


@pytest.mark.parametrize("ahead", [0, 1])
def test_requests_begin_with_no_step_of_earlier_ones(ahead: int) -> None:
    engine = Engine(ahead)
    queue = queue_of(engine)
    for number in range(2):
        queue.add(groups(3, first=number))
        assert [[drawn.prompt for drawn in queue.run(1)] for _ in range(3)] == [[], [], [number]]
        assert not engine.queue


@pytest.mark.parametrize("ahead", [0, 1])
def test_requests_beyond_capacity_wait_and_can_be_withdrawn(ahead: int) -> None:
    engine = Engine(ahead, room=2)
    queue = queue_of(engine)
    queue.add(groups(3, 3, 3, 3, 3))
    assert queue.waiting() == [0, 1, 2, 3, 4]
    queue.run(1)
    assert queue.waiting() == [2, 3, 4]
    queue.withdraw([3, 2])
    assert queue.waiting() == [4]
    assert [drawn.prompt for drawn in queue.run()] == [0, 1, 4]
    assert queue.waiting() == []


def test_a_lost_request_is_an_error() -> None:
    engine = Engine(0)
    queue = queue_of(engine)
    queue.add(groups(3, 3))
    engine.abort_request(["0", "1"])
    with pytest.raises(RuntimeError, match=r"engine replica 0 failed .* rows 3: RuntimeError: it has lost 2 of the"):
        queue.run()


def test_people_see_responses_arrive() -> None:
    seen = []
    queue = queue_of(Engine(0), on_finished=lambda *sample: seen.append(progress.now()))
    [engine] = Replicas(1).engines
    session = SamplingSession(engine, queue, num_slots=8)  # type: ignore[arg-type]
    (first,), (second,) = groups(1, samples=2), groups(2)
    with progress.within("gen"):
        session.add({0: first, 1: second})
        session.advance(None)
    assert [(phase.done, phase.total, phase.unit) for phase in seen if phase] == [
        (1, 3, "responses"),
        (2, 3, "responses"),
        (3, 3, "responses"),
    ]
