"""A process that calls rewards for a supervisor: one request after another, or a single one.

A request holds one response, or several for a reward that takes several at once.

The bound on memory is the only safeguard here against the rewards: they may do anything to this process, and the
supervisor does not rely on it.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from megarl.platform.custom_code import place_of
from megarl.platform.errors import UserError
from megarl.platform.processes import bound_memory, die_with_parent
from megarl.platform.secrets import beginning
from megarl.sandbox import signals
from megarl.sandbox.limits import WorkerLimits
from megarl.sandbox.protocol import Arguments, Callee, GroupReward, Outcome, TooLateError
from megarl.sandbox.wire import Inbox, encode, unpack

_SHOWN_CHARACTERS = 500


def serve(connection: socket.socket, output: int, rules: Callee, *, limits: WorkerLimits, supervisor: int) -> NoReturn:
    """Load the rules, and answer all requests. The process `supervisor` forked this one."""
    reward = load(connection, output, rules, limits=limits, supervisor=supervisor)
    inbox = Inbox(connection, max_bytes=sys.maxsize)
    is_sound = True
    while is_sound:
        request = inbox.wait()
        samples = arguments_of(request, rules)
        connection.sendall(encode({"id": request["id"], "started": os.getpid()}))  # its time limit starts now
        is_sound = answer(connection, request["id"], samples, reward, timeout_s=limits.timeout_s)
    os._exit(1)  # the supervisor replaces it


def load(
    connection: socket.socket, output: int, rules: Callee, *, limits: WorkerLimits, supervisor: int
) -> GroupReward:
    """Return the rules' function in a process that the process `supervisor` forked, and report it.

    The process ends if the rules do not load.

    Everything that is printed goes to the pipe `output`.
    """
    os.setsid()
    die_with_parent(signal.SIGKILL, parent=supervisor)
    signal.signal(signals.RANK_ENDED, signal.SIG_DFL)
    os.register_at_fork(after_in_child=signals.restore)
    _redirect(output)
    bound_memory(limits.max_memory)
    try:
        reward = rules.load()
    except BaseException as error:  # the user's file may raise anything
        connection.sendall(encode({"error": _describe(error)}))
        os._exit(1)
    end_lines()
    connection.sendall(encode({"ready": True, "threads": _num_threads()}))
    return reward


def arguments_of(request: Mapping[str, Any], rules: Callee) -> list[Arguments]:
    """Return the arguments of each response of a request, after the import of what their data sources need."""
    samples: list[Arguments] = unpack(request["samples"])
    for arguments in samples:
        rules.warm_up(arguments["data_source"])
    return samples


def answer(
    connection: socket.socket, number: int, samples: Sequence[Arguments], reward: GroupReward, *, timeout_s: float
) -> bool:
    """Answer the request `number`; return whether this process can continue."""
    process = os.getpid()
    deadline = time.monotonic() + timeout_s
    is_sound = True
    reply = dict[str, object]()
    try:
        reply["results"] = [_as_reply(outcome) for outcome in reward(samples, deadline)]
    except BaseException as error:  # sys.exit is a failure too
        reply["error"] = _describe(error)
        is_sound = isinstance(error, Exception) and not isinstance(error, MemoryError)
    if os.getpid() != process:  # a reward forked, and this is the copy
        os._exit(0)
    end_lines()
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    connection.sendall(encode({"id": number, **reply}))
    return is_sound


def end_lines() -> None:
    """End and send what this process has printed without the end of a line, so that no other text continues it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # code of users may have replaced or closed it
            stream.write("\n")
            stream.flush()


def _as_reply(outcome: Outcome) -> dict[str, object]:
    match outcome:
        case TooLateError():
            return {"late": True}
        case Exception():
            return {"error": _describe(outcome)}
    return outcome._asdict()


def _describe(error: BaseException) -> str:
    words = ""
    with suppress(Exception):  # the text of a user's exception may raise
        words = beginning(str(error), _SHOWN_CHARACTERS)
    if words and isinstance(error, UserError):
        return words
    description = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return description + place_of(error)


def _num_threads() -> int:
    """Return the number of threads of this process, also those that Python does not know."""
    try:
        return len(list(Path("/proc/self/task").iterdir()))
    except OSError:  # not Linux
        import threading

        return threading.active_count()


def _redirect(output: int) -> None:
    """Give the process no input, and send its output line by line, so that the lines before a crash arrive."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False, encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False, encoding="utf-8")  # noqa: SIM115, PTH123
