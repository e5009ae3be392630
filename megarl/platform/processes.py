"""Processes below this one: none may outlive it, none may escape it. Linux; elsewhere these functions do less, as said.

A process that adopts orphans (`PR_SET_CHILD_SUBREAPER`) keeps everything that it started below it, whatever is done to
get away (double forks, sessions of their own), so that `end_descendants` returns True only when nothing is left.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ROUND_S = 0.001


def die_with_parent(by: signal.Signals, *, parent: int | None = None) -> None:
    """Have the kernel send this process `by` when the thread that started it ends; elsewhere, nothing.

    `parent` is the process that should be the parent: where it is gone already, the signal comes at once.
    """
    _prctl(_PR_SET_PDEATHSIG, by)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), by)


def follow_parent() -> None:
    """End this process a second after its parent at the latest, whichever thread of it started this one.

    For parents that may start processes in threads which end: to `die_with_parent` that is the end of the parent.
    """
    parent = os.getppid()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="megarl-parent", daemon=True).start()


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends; elsewhere, nothing."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def bound_memory(num_bytes: int) -> None:
    """Have allocations beyond `num_bytes` of private memory fail in this process and in each that it starts.

    Where the machine itself runs out of memory, the kernel is asked to end these processes first.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def children(pid: int | None = None) -> Iterator[int]:
    """The processes that `pid` started, by default this one. None where the kernel does not list them."""
    pid = os.getpid() if pid is None else pid
    with suppress(OSError):  # it is gone
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                yield from map(int, (thread / "children").read_text().split())


def descendants(pid: int | None = None) -> Iterator[int]:
    """The processes below `pid`, by default this one, nearest first. None where the kernel does not list children."""
    found, seen = [os.getpid() if pid is None else pid], set[int]()
    for parent in found:
        for child in children(parent):
            if child not in seen:
                seen.add(child)
                found.append(child)
                yield child


def end_descendants(*, spare: Collection[int] = (), within_s: float | None = None) -> bool:
    """Kill every process below this one but those in `spare`, and those that they start meanwhile, until none is left.

    Returns False where some are left after `within_s` seconds (None: however long it takes): the kernel does not let
    go of a process while it waits for a device.
    """
    deadline = None if within_s is None else time.monotonic() + within_s
    while any([_end(pid) for pid in descendants() if pid not in spare]):
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(_ROUND_S)
    return True


def _end(pid: int) -> bool:
    """Kill and bury a process below this one; whether there is something left of it to come back for."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
    except ChildProcessError:  # not our child but one of its own, who has to bury it
        if _state(pid) in ("Z", ""):
            return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it is gone
        return ""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value))
