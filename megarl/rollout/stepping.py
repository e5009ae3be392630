"""vLLM's engine, stepped by hand: requests are added and stopped between two of its steps.

All ranks of a replica execute the same steps in lockstep, so they must add and stop the same requests between the same
steps. Each rank decides alone: a decision follows from tokens, which are the same on all ranks of a replica, and from
counted steps, never from a clock. So no decision needs a message.

On CUDA, vLLM schedules a step while the device computes the one before it, and holds both in a queue. A step is counted
when its tokens are there, and no step stays in the queue when the requests have ended.
"""

from collections.abc import Collection, Sequence
from itertools import count
from typing import Any


class Stepper:
    """The requests of one vLLM engine."""

    def __init__(self, engine: Any) -> None:
        """Take a `vllm.LLMEngine` without requests."""
        self._engine, self._names = engine, count()
        self._latest = dict[str, Any]()  # by the name of a running request: its last output, or None

    def add(self, token_ids: Sequence[int], params: Any) -> str:
        """Add a request before the next step, and return its name."""
        from vllm.inputs import tokens_input

        name = str(next(self._names))
        self._engine.add_request(name, tokens_input(list(token_ids)), params)
        self._latest[name] = None
        return name

    def step(self) -> list[Any]:
        """Draw the next token of every request that has room, and return the outputs of finished requests.

        Raises:
            RuntimeError: vLLM has no requests left, but some never finished.
        """
        if not self._engine.has_unfinished_requests():
            lost, self._latest = len(self._latest), {}
            raise RuntimeError(f"it has lost {lost} of the samples that it was asked for")
        if self._queue is not None and not self._queue:
            self._engine.step()  # schedules the first step, and returns before its tokens are there
        outputs = self._engine.step()
        for output in outputs:
            self._latest[output.request_id] = output
        finished = [output for output in outputs if output.finished]
        for output in finished:
            del self._latest[output.request_id]
        if not self._latest:
            self._finish_queue()
        return finished

    def stop(self) -> dict[str, Any]:
        """Stop all requests. Return the last output of each by its name.

        The output is None if the request has no token, or if its parameters ask for the final output alone.
        """
        stopped, self._latest = self._latest, {}
        self._engine.abort_request(list(stopped))
        if stopped:
            self._engine.step()  # in which vLLM forgets them: until then their memory is taken
            self._finish_queue()
        return stopped

    def waiting(self) -> list[str]:
        """Return the names of the requests that had no room yet, in the order in which they were added."""
        from vllm.v1.request import RequestStatus

        requests = self._engine.engine_core.engine_core.scheduler.requests.values()
        waiting = {request.request_id for request in requests if request.status == RequestStatus.WAITING}
        names = {name.partition("-")[0] for name in waiting}  # vLLM appends a part of its own to a name
        return [name for name in self._latest if name in names]

    def withdraw(self, names: Collection[str]) -> None:
        """Remove requests that wait, if others stay. They have no memory that a step must free."""
        self._engine.abort_request(list(names))
        for name in names:
            del self._latest[name]

    def _finish_queue(self) -> None:
        while self._queue:
            self._engine.step()

    @property
    def _queue(self) -> Sequence[Any] | None:
        """The steps that are scheduled, if vLLM schedules ahead."""
        queue: Sequence[Any] | None = self._engine.engine_core.engine_core.batch_queue
        return queue
