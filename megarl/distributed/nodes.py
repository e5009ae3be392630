"""Work that one rank of each node does for all ranks of the node, such as filling a directory on its disk."""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import torch.distributed as dist

from megarl.distributed import watchdog
from megarl.distributed.exchange import together
from megarl.platform.remote import ReportProgress

TURN_S = 1.0
"""Seconds between two exchanges of progress among the ranks."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

T = TypeVar("T")
Work = Callable[[ReportProgress], T]
"""A function that receives another, to report how much more is done, in any unit."""


def once_a_node(work: Work[T], *, phase: str) -> T:
    """Run `work` on the first rank of each node, and return its node's result on every rank. Collective.

    While the sum of any node grows, the watchdogs of all ranks see progress in `phase`. Without ranks `work` is only
    called.

    Raises:
        Exception: on all ranks, if `work` raised it on any node.
    """
    if not dist.is_initialized():
        return work(lambda _: None)
    task = _Background(work) if os.environ.get("LOCAL_RANK", "0") == "0" else None
    before = watchdog.note(phase=phase)
    done = -1
    while True:
        turns = together(lambda: task.wait() if task else (True, 0))
        now = sum(amount for _, amount in turns)
        if now > done:
            watchdog.note(phase=phase)
            done = now
        if all(is_over for is_over, _ in turns):
            break
    here = _node()
    results = together(lambda: (here, task.result()) if task else None)
    watchdog.note(phase=before)
    return next(result for node, result in filter(None, results) if node == here)


def _node() -> tuple[str, str]:
    """Return what tells a node from all others: its name, which another may have, and the id of its kernel's start."""
    return socket.gethostname(), BOOT_ID.read_text(encoding="ascii") if BOOT_ID.exists() else ""


class _Background(Generic[T]):
    """Work in a thread that does not keep the process alive."""

    def __init__(self, work: Work[T]) -> None:
        self._results: list[T] = []
        self._error: Exception | None = None
        self._amount = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, args=[work], name="megarl-node", daemon=True)
        self._thread.start()

    def wait(self) -> tuple[bool, int]:
        """Wait for at most TURN_S seconds; return whether the work is over and how much of it is done."""
        self._thread.join(TURN_S)
        return not self._thread.is_alive(), self._amount

    def result(self) -> T:
        """Return the result of the finished work, or raise its error."""
        if self._error:
            raise self._error
        return self._results[0]

    def _run(self, work: Work[T]) -> None:
        try:
            self._results.append(work(self._report))
        except Exception as error:
            self._error = error

    def _report(self, amount: int) -> None:
        with self._lock:
            self._amount += amount
