"""The signals that supervisors and workers do not hear, because launchers send them to every process of a job."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

RANK_ENDED = signal.SIGUSR2
"""The signal that a supervisor gets when its rank ends."""
UNHEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that a supervisor and its processes ignore; programs and forks of a reward receive them."""

_KEPT = ContextVar("kept", default=False)


def ignore() -> None:
    """Ignore the signals from now on, also those that `blocked` has held back."""
    for number in UNHEARD:
        signal.signal(number, lambda *_: None)  # programs that a reward starts would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNHEARD)


def restore() -> None:
    """Make this process end by the signals, except inside `kept`."""
    if _KEPT.get():
        return
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def blocked() -> Iterator[None]:
    """Hold the signals back for this thread, and for the processes that it starts inside the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def kept() -> Iterator[None]:
    """Let processes that are forked inside the block ignore the signals as this one does."""
    token = _KEPT.set(True)
    try:
        yield
    finally:
        _KEPT.reset(token)
