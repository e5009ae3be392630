"""Bound what somebody else's code may compute in this process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def computing_at_most(seconds: float) -> Iterator[None]:
    """Interrupt the block once this process has computed for so long: seconds of CPU time, so that no load shortens it.

    Only the main thread can be interrupted; in others the block is not bounded.

    Raises:
        TimeoutError: the time is over.
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
    """No `except Exception` of the interrupted code takes it for an error of its own."""


def _interrupt(*_: object) -> NoReturn:
    raise _TimeOver
