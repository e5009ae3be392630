"""Forks of this process, which imports nothing heavy."""

import atexit
import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

from megarl.platform.early import SIGNALS
from megarl.platform.processes import die_with_parent

T = TypeVar("T")


def run_in_child(look: Callable[[], T]) -> T:
    """Return what `look` returns in a forked process, so that this process does nothing of it. Linux only.

    If the forked process ends before, this process ends with the same exit code. Signals reach this process alone.
    """
    parent = os.getpid()
    source, target = os.pipe()
    pid = fork()
    if pid == 0:
        die_with_parent(signal.SIGKILL, parent=parent)
        for number in SIGNALS:  # the programs that this process starts would inherit SIG_IGN, but not a function
            signal.signal(number, lambda *_: None)
        os.close(source)
        with os.fdopen(target, "wb") as pipe:
            pickle.dump(look(), pipe)
        flush()
        os._exit(0)
    os.close(target)
    with os.fdopen(source, "rb") as pipe:
        found = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        sys.exit(as_shell(code))
    result: T = pickle.loads(found)  # noqa: S301 - a copy of this process wrote it
    return result


def fork() -> int:
    """Fork this process; what it has printed so far is printed once."""
    flush()
    return os.fork()


def flush() -> None:
    """Print what is left in the buffers of the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError):  # a process may have been started without it
            stream.flush()


def end(code: int = 0) -> NoReturn:
    """End this process after the functions of `atexit`: to unload what was imported takes seconds."""
    atexit._run_exitfuncs()
    flush()
    os._exit(code)


def as_shell(code: int) -> int:
    """Return an exit code as a shell counts it: 128 + N instead of Python's -N for a process that signal N ended."""
    return code if code >= 0 else 128 - code
