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
from collections.abc import Sequence
from contextlib import suppress
from os import fork  # a user's file that guards against responses replaces it in its module
from socket import socket as Socket  # noqa: N812 - as above
from typing import NoReturn

from megarl.platform.processes import die_with_parent
from megarl.sandbox import signals
from megarl.sandbox.limits import WorkerLimits
from megarl.sandbox.protocol import Callee
from megarl.sandbox.results import as_rule_result
from megarl.sandbox.wire import Inbox, encode
from megarl.sandbox.worker import answer, arguments_of, end_lines, load

_KEPT = os.O_RDONLY | os.O_WRONLY | os.O_RDWR | os.O_APPEND  # other flags belong to the creation of a file
_NUM_REHEARSALS = 4
_REPLY = 1 << 12


def serve_forks(
    connection: socket.socket, output: int, rules: Callee, *, limits: WorkerLimits, supervisor: int
) -> NoReturn:
    """Load the rules, and fork a worker for each socket and pipe that the process `supervisor` sends.

    The supervisor learns the number of each worker, and how it ended, before it asks for the next.
    """
    stage = socket.socketpair()  # the user's file may replace what makes it
    reward = load(connection, output, rules, limits=limits, supervisor=supervisor)
    signals.ignore()  # the user's file may have set other handlers
    _rehearse(*stage)  # D437
    inbox = Inbox(connection, max_bytes=sys.maxsize)
    fork_server = os.getpid()
    while True:
        _, files, *_ = socket.recv_fds(connection, 1, 2, socket.MSG_CMSG_CLOEXEC)
        if len(files) < 2:
            os._exit(0)  # the supervisor has hung up
        request = inbox.wait()
        samples = arguments_of(request, rules)
        gc.freeze()  # a collection in a worker would touch, and so copy, everything that is loaded
        end_lines()
        shared = _regular_files()
        theirs = Socket(fileno=files[0])
        printed = files[1]
        with signals.kept():
            pid = fork()
        if pid == 0:
            try:
                connection.close()
                _separate(printed, shared, fork_server=fork_server)
                is_sound = answer(theirs, request["id"], samples, reward, timeout_s=limits.timeout_s)
                os._exit(0 if is_sound else 1)
            except Exception:
                sys.excepthook(*sys.exc_info())  # the warning shows these last lines
            finally:
                os._exit(1)
        theirs.close()
        os.close(printed)
        connection.sendall(encode({"id": request["id"], "started": pid}))  # its time limit starts now
        connection.sendall(encode({"ended": _wait(pid)}))


def _rehearse(ours: socket.socket, theirs: socket.socket) -> None:
    """Answer requests whose reward is a constant, so that a worker finds the caches of Python filled.

    Each worker would fill them again, and copy the memory that it writes.
    """
    with ours, theirs:
        for result in (1, 1.0, True, {"score": 1.0}) * _NUM_REHEARSALS:
            answer(theirs, 0, [{}], lambda samples, deadline: [as_rule_result(result)], timeout_s=1.0)  # noqa: B023
            ours.recv(_REPLY)


def _separate(printed: int, shared: Sequence[int], *, fork_server: int) -> None:
    """Separate a process that the process `fork_server` forked from it and from other workers."""
    os.setsid()
    die_with_parent(signal.SIGKILL, parent=fork_server)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)
    for number in shared:
        _open_again(number)


def _regular_files() -> list[int]:
    """Return the open files of this process that have a position."""
    found = []
    with suppress(OSError):  # the kernel lists no open files
        for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - it runs for each response
            with suppress(OSError):  # the list itself is open no more
                if stat.S_ISREG(os.fstat(number).st_mode):
                    found.append(number)
    return found


def _open_again(number: int) -> None:
    """Give this process its own position in an open file: after a fork it is shared."""
    with suppress(OSError):  # a thread of the user's file has closed it
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
