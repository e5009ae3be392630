"""The signals that keepers and workers do not hear, because launchers send them to every process of a job."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

UNHEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that a keeper and its processes ignore; programs and forks of a reward receive them."""


def ignore() -> None:
    """Ignore the signals from now on, also those that `blocked` has held back."""
    for number in UNHEARD:
        signal.signal(number, lambda *_: None)  # programs that a reward starts would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNHEARD)


def restore() -> None:
    """Make this process end by the signals."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def blocked() -> Iterator[None]:
    """Hold the signals back for this thread, and for the processes that it starts inside the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
