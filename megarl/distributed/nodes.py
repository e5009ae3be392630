"""Work that one rank of each node does for the others: what it brings to the node's disk is there for all of them."""

import os
import socket
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch.distributed as dist

from megarl.distributed import watchdog
from megarl.distributed.exchange import together

TURN_S = 1.0
"""How often the ranks tell each other how far the work has come."""

T = TypeVar("T")
Count = Callable[[int], None]


def once_a_node(work: Callable[[Count], T], *, phase: str) -> T:
    """The answer of `work` on the first rank of this node. Collective; without ranks `work` is simply done.

    `work` is given a function to tell how much is done, in any unit. While any node's number grows, the watchdogs of
    all ranks see progress in `phase`.

    Raises:
        Exception: what `work` raises on any node, on all ranks.
    """
    if not dist.is_initialized():
        return work(lambda _: None)
    task = _Task(work) if os.environ.get("LOCAL_RANK", "0") == "0" else None
    before, done = watchdog.note(phase=phase), -1
    while True:
        turns = together(lambda: task.wait() if task else (True, 0))
        if (now := sum(amount for _, amount in turns)) > done:
            watchdog.note(phase=phase)
            done = now
        if all(is_over for is_over, _ in turns):
            break
    host = socket.gethostname()
    answers = together(lambda: (host, task.answer()) if task else None)
    watchdog.note(phase=before)
    return next(answer for where, answer in filter(None, answers) if where == host)


class _Task(Generic[T]):
    """Work in a thread that does not keep the process alive."""

    def __init__(self, work: Callable[[Count], T]) -> None:
        self._answers: list[T] = []
        self._error: Exception | None = None
        self._amount, self._lock = 0, threading.Lock()
        self._thread = threading.Thread(target=self._run, args=[work], name="megarl-node", daemon=True)
        self._thread.start()

    def wait(self) -> tuple[bool, int]:
        """Whether the work is over, after at most a turn, and how much of it is done."""
        self._thread.join(TURN_S)
        return not self._thread.is_alive(), self._amount

    def answer(self) -> T:
        """What the work, which is over, gave or raised."""
        if self._error:
            raise self._error
        return self._answers[0]

    def _run(self, work: Callable[[Count], T]) -> None:
        try:
            self._answers.append(work(self._count))
        except Exception as error:
            self._error = error

    def _count(self, amount: int) -> None:
        with self._lock:
            self._amount += amount
