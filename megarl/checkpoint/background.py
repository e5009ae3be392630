"""Work that is done asynchronously to training, on every rank.

Only the main threads join collectives, and all ranks agree on what is done. A `Task` alternates between the two kinds
of thread:

    main thread of every rank              a thread of this rank alone
    ---------------------------            ---------------------------
    run the task up to a yield   --work--> work()
    train: `advance` after each step       ...
    have all ranks finished?     <-result- done
    send the results of all ranks into the task, run it up to the next yield, and so on until it returns

If the work of one rank raises an error, every rank raises it, and the task ends.
"""

from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any

from megarl.distributed.exchange import largest, together

LocalWork = Callable[[], object]
"""Work of one rank, in any thread: it joins no collective, but may exchange messages in groups of its own."""
Task = Generator[LocalWork, list[Any], None]
"""Yields the work of this rank, and receives the results of all ranks, in rank order."""


def run_blocking(task: Task) -> None:
    """Run a task to its end in the main thread. Collective."""
    work = next(task, None)
    while work:
        work = _resume(task, together(work))


class Background:
    """Runs one task at a time, its work in a separate thread. Every method is collective."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._result: Future[object] = Future()

    def start(self, task: Task) -> None:
        """Start a task, after finishing the task that is running."""
        self.finish()
        self._start_thread(task, next(task, None))

    def advance(self) -> None:
        """Resume the running task if all ranks have finished their work.

        Raises:
            Exception: the work failed on some rank; as `together` does.
        """
        if self._task and not largest(int(not self._result.done())):
            self._continue(self._task)

    def wait(self, seconds: float) -> None:
        """Wait until this rank has finished its work, at most `seconds`."""
        wait([self._result], timeout=seconds)

    def finish(self) -> None:
        """Wait for the end of the running task. Raises as `advance` does."""
        while self._task:
            wait([self._result])
            self._continue(self._task)

    def _continue(self, task: Task) -> None:
        self._task = None  # a task that fails has ended
        self._start_thread(task, _resume(task, together(self._result.result)))

    def _start_thread(self, task: Task, work: LocalWork | None) -> None:
        if work is None:
            return
        self._task = task
        self._result = Future()
        # A daemon does not keep the process alive: a run that fails loses the work it has started, and nothing else.
        Thread(target=_run, args=(work, self._result), name="megarl-background", daemon=True).start()


def _run(work: LocalWork, result: Future[object]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)


def _resume(task: Task, results: list[object]) -> LocalWork | None:
    """Send the results of all ranks into a task; return its next work, None at its end."""
    try:
        return task.send(results)
    except StopIteration:
        return None
