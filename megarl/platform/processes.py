"""Control of descendant processes: none outlives this process or escapes it. Full effect on Linux only.

A process that adopts orphans (`PR_SET_CHILD_SUBREAPER`) stays the ancestor of every process that it started, even of
double forks and new sessions. So `end_descendants` returns True only when no process is left.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ROUND_S = 0.001
_LIBC = ctypes.CDLL(None)


def die_with_parent(by: signal.Signals, *, parent: int | None = None) -> None:
    """Make the kernel send `by` to this process when the thread that started it ends. Linux only.

    `parent` is the expected parent process: if it has ended already, the signal is sent at once.
    """
    _prctl(_PR_SET_PDEATHSIG, by)  # D5
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), by)


def follow_parent() -> None:
    """End this process at most a second after its parent, whichever thread of the parent started it.

    For parents that start processes in short-lived threads: `die_with_parent` takes the end of such a thread for the
    end of the parent.
    """
    import threading

    parent = os.getppid()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="megarl-parent", daemon=True).start()


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends. Linux only."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def bound_memory(num_bytes: int) -> None:
    """Let allocations beyond `num_bytes` of private memory fail in this process and in each of its descendants.

    If the machine runs out of memory, the kernel ends these processes first.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))  # D76
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


def children(pid: int | None = None) -> Iterator[int]:
    """Yield the processes that `pid`, by default this process, started; nothing if the kernel does not list them."""
    pid = os.getpid() if pid is None else pid
    with suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - reward processes do this for each response
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as listed:  # noqa: PTH123
                yield from map(int, listed.read().split())


def descendants(pid: int | None = None) -> Iterator[int]:
    """Yield the descendants of `pid`, by default of this process, nearest first; nothing if the kernel lists none."""
    found = [os.getpid() if pid is None else pid]
    seen = set[int]()
    for parent in found:
        for child in children(parent):
            if child not in seen:
                seen.add(child)
                found.append(child)
                yield child


def end_descendants(*, spare: Collection[int] = (), within_s: float | None = None) -> bool:
    """Kill every descendant except those in `spare`, also new ones, until none is left.

    Return False if some are left after `within_s` seconds (None: no limit), because the kernel cannot end a process
    while it waits for a device.
    """
    deadline = None if within_s is None else time.monotonic() + within_s
    while any([_end(pid) for pid in descendants() if pid not in spare]):
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(_ROUND_S)
    return True


def _end(pid: int) -> bool:
    """Kill and reap a descendant; return whether it has to be checked again."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
    except ChildProcessError:  # a child of a descendant, which has to reap it
        if _state(pid) in ("Z", ""):
            return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()  # a name is any bytes
    except OSError:  # the process has ended
        return ""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _LIBC.prctl(option, ctypes.c_ulong(value))
