"""A bound on the time that foreign code may compute in this process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def computing_at_most(seconds: float) -> Iterator[None]:
    """Interrupt the block after `seconds` of CPU time of this process; load on the machine does not count.

    Only the main thread can be interrupted. In another thread the block is not bounded.

    Raises:
        TimeoutError: the block used up its time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except _TimeOver as over:
        raise TimeoutError from over
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class _TimeOver(BaseException):
    """An error that no `except Exception` of the interrupted code catches."""


def _interrupt(*_: object) -> NoReturn:
    raise _TimeOver
