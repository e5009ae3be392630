"""Bounds on the time and the memory that foreign code may take in this process."""

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def computing_at_most(seconds: float) -> Iterator[None]:
    """Interrupt the block after `seconds` of CPU time of this process, the kernel's time for it included.

    Load on the machine does not count. Within such a block, another one has no more time than is left.

    Only the main thread can be interrupted. In another thread the block is not bounded.

    Raises:
        TimeoutError: the block used up its time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_running = True

    def interrupt(*_: object) -> None:
        if is_running:  # Python may call this after the timer is off
            raise _TimeOver

    left, again = signal.setitimer(signal.ITIMER_PROF, 0)  # of a block around this one
    began = time.process_time()
    before = signal.signal(signal.SIGPROF, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, min(seconds, left or seconds), _AGAIN)  # D279
            yield
        finally:
            is_running = False
    except _TimeOver as over:
        raise TimeoutError from over
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        if left:
            signal.setitimer(signal.ITIMER_PROF, max(left - (time.process_time() - began), _AT_ONCE), again)


@contextmanager
def allocating_at_most(num_bytes: int) -> Iterator[None]:
    """Let the block map at most `num_bytes` more memory, so that Python raises MemoryError in it beyond that.

    The bound holds for all threads of the process while the block runs. Only the main thread sets it. In another thread
    the block is not bounded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    bounds = [mapped + num_bytes, *(bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_AT_ONCE = 1e-6  # seconds; 0 would switch the timer off
_AGAIN = 0.1  # seconds until the block is interrupted again: Python ignores an error in a destructor


class _TimeOver(BaseException):
    """An error that no `except Exception` of the interrupted code catches."""
