"""Work that goes on beside training, on every rank: only the main thread joins collectives, and all ranks agree.

A task is a generator. Up to its first `yield` it runs in the main threads of all ranks. What it yields is work for this
rank alone; when all ranks have done theirs, the task goes on in the main threads with the answers of all of them, in
rank order. An error in the work of one rank is raised on every rank, and ends the task.
"""

from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any

from megarl.distributed.exchange import together

Task = Generator[Callable[[], Any], list[Any], None]


def run_blocking(task: Task) -> None:
    """Do a task while nothing else goes on. Collective."""
    work = next(task, None)
    while work:
        work = _go_on(task, together(work))


class Background:
    """Does one task at a time, its work in a thread of its own. Every method is collective."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._answer: Future[Any] = Future()

    def start(self, task: Task) -> None:
        """Begin a task; one that is still under way is finished first."""
        self.finish()
        self._hand_over(task, next(task, None))

    def advance(self) -> None:
        """Let the task that is under way go on if all ranks have done their work.

        Raises:
            Exception: the work failed on some rank; as `together` does.
        """
        if self._task and all(together(self._answer.done)):
            self._take_over(self._task)

    def finish(self) -> None:
        """Wait for the end of the task that is under way. Raises as `advance` does."""
        while self._task:
            wait([self._answer])
            self._take_over(self._task)

    def _take_over(self, task: Task) -> None:
        self._task = None  # a task that fails is over
        self._hand_over(task, _go_on(task, together(self._answer.result)))

    def _hand_over(self, task: Task, work: Callable[[], Any] | None) -> None:
        if work is None:
            return
        self._task, self._answer = task, Future()
        # As a daemon it keeps no process from ending: what a failed run has begun is lost, and nothing else.
        Thread(target=_do, args=(work, self._answer), name="megarl-background", daemon=True).start()


def _do(work: Callable[[], Any], answer: Future[Any]) -> None:
    try:
        answer.set_result(work())
    except BaseException as error:
        answer.set_exception(error)


def _go_on(task: Task, answers: list[Any]) -> Callable[[], Any] | None:
    """The work after that which had these answers, None at the end."""
    try:
        return task.send(answers)
    except StopIteration:
        return None
