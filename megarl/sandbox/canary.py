"""A known wrong response, scored now and then: if it earns more than at first, a response has changed the reward.

Only a process that handles one request after another can be changed. The check does not rely on a reward that gives
equal responses equal scores: a reward that varies is not checked.
"""

from itertools import islice
from typing import Protocol

from megarl.sandbox.protocol import Callee

NUM_REPEATS = 3
"""Repeats of a score that distinguish a reward that has changed from a reward that varies."""
MAX_CANARIES = 2
"""Most wrong responses that are tried at first."""
MAX_CALLS = max(MAX_CANARIES * (NUM_REPEATS + 1), 2 * NUM_REPEATS + 1)
"""Most calls before one request: to choose a canary, or to check with it."""


class Worker(Protocol):
    """A process that calls the rules, and is made again when it has ended."""

    def score_alone(self, sample: object) -> float | None:
        """Return the score of one response; None if it has none."""

    def end(self) -> None:
        """End the process, so that the next call begins in a new one."""


class Canary:
    """The known wrong response of one supervisor, and the score that it earned at first."""

    def __init__(self, rules: Callee, worker: Worker, *, every: int) -> None:
        """Score a canary before the first request and before each request after `every` others; 0 = never.

        Args:
            rules: make a canary of a response.
            worker: calls the rules.
            every: the number of requests between two checks.
        """
        self._rules = rules
        self._every = every
        self._worker = worker
        self._num_requests = 0
        self._sample: object = None
        self._at_first = 0.0

    def fault(self, sample: object) -> str | None:
        """Count a request with this response; describe how the reward has changed; None if it has not."""
        if not self._every:
            return None
        number = self._num_requests
        self._num_requests = self._num_requests + 1
        if number == 0:
            self._begin(sample)
        elif number % self._every == 0 and self._sample is not None:
            return self._change()
        return None

    def _begin(self, sample: object) -> None:
        """Take the first canary that the reward gives a score, always the same."""
        for canary in islice(self._rules.canaries(sample), MAX_CANARIES):
            first = self._worker.score_alone(canary)
            if first is not None and self._always_earns(canary, first):
                self._sample = canary
                self._at_first = first
                return

    def _change(self) -> str | None:
        now = self._worker.score_alone(self._sample)
        if now is None or now <= self._at_first or not self._always_earns(self._sample, now):
            return None
        self._worker.end()
        if not self._always_earns(self._sample, self._at_first):
            return None
        return (
            f"a response has changed the reward: a wrong response earns {now:g} after {self._num_requests - 1} "
            f"requests, and {self._at_first:g} in a new process"
        )

    def _always_earns(self, canary: object, score: float) -> bool:
        return all(self._worker.score_alone(canary) == score for _ in range(NUM_REPEATS))
