"""A process that has loaded the rules and never calls them: it forks a worker for each request.

So a request finds the rules as they were loaded, whatever an earlier response did to its own process. The worker shares
no socket, no pipe and no position in a file with this process or with another worker; it is a session of its own, so
that a signal to its group reaches nothing else. Files on disk, and memory that was made to be shared, are not copied.
"""

import fcntl
import gc
import os
import signal
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megarl.platform.processes import die_with_parent
from megarl.sandbox import signals
from megarl.sandbox.limits import WorkerLimits
from megarl.sandbox.protocol import Callee, GroupReward
from megarl.sandbox.wire import Inbox, encode
from megarl.sandbox.worker import answer, load

_KEPT = os.O_RDONLY | os.O_WRONLY | os.O_RDWR | os.O_APPEND  # other flags belong to the creation of a file


def serve_forks(
    connection: socket.socket, output: int, rules: Callee, *, limits: WorkerLimits, supervisor: int
) -> NoReturn:
    """Load the rules, and fork a worker for each socket and pipe that the process `supervisor` sends.

    The supervisor learns how each worker ended before it asks for the next. The worker itself tells its number.
    """
    reward = load(connection, output, rules, limits=limits, supervisor=supervisor)
    inbox = Inbox(connection, max_bytes=sys.maxsize)
    while True:
        _, files, *_ = socket.recv_fds(connection, 1, 2, socket.MSG_CMSG_CLOEXEC)
        if len(files) < 2:
            os._exit(0)  # the supervisor has hung up
        theirs, printed = files
        request = inbox.wait()
        for data_source in request["data_sources"]:
            rules.warm_up(data_source)
        gc.freeze()  # a collection in a worker would touch, and so copy, everything that is loaded
        with suppress(Exception):  # the user's file may have replaced it
            sys.stdout.flush()
        fork_server = os.getpid()
        with signals.blocked():
            pid = os.fork()
            if pid == 0:
                connection.close()
                _work(theirs, printed, rules, reward, timeout_s=limits.timeout_s, fork_server=fork_server)
        os.close(theirs)
        os.close(printed)
        connection.sendall(encode({"ended": _wait(pid)}))


def _work(
    theirs: int, printed: int, rules: Callee, reward: GroupReward, *, timeout_s: float, fork_server: int
) -> NoReturn:
    """Answer one request, in a process that the process `fork_server` forked."""
    try:
        os.setsid()
        die_with_parent(signal.SIGKILL, parent=fork_server)
        signals.ignore()
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.close(printed)
        _open_again(spare=theirs)
        connection = socket.socket(fileno=theirs)
        request = Inbox(connection, max_bytes=sys.maxsize).wait()
        os._exit(0 if answer(connection, request, rules, reward, timeout_s=timeout_s) else 1)
    except Exception:
        sys.excepthook(*sys.exc_info())  # the warning shows these last lines
    finally:
        os._exit(1)


def _open_again(*, spare: int) -> None:
    """Give this process its own position in each file that is open: after a fork they are shared."""
    with suppress(OSError):  # the kernel lists no open files
        for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            with suppress(OSError):  # the list itself is open no more
                if number != spare and stat.S_ISREG(os.fstat(number).st_mode):
                    flags = fcntl.fcntl(number, fcntl.F_GETFL) & _KEPT
                    own = os.open(f"/proc/self/fd/{number}", flags)
                    os.lseek(own, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
                    os.dup2(own, number, inheritable=os.get_inheritable(number))
                    os.close(own)


def _wait(pid: int) -> int | None:
    """Wait for the end of a worker. Return its exit code, negative for a signal; None if it is unknown."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # the user's file lets the kernel reap children
        return None
