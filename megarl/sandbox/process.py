"""The supervisor's view of a process that loads or calls rules: its messages, its output and its end."""

import math
import os
import select
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from megarl.platform.secrets import redact
from megarl.sandbox.wire import Inbox

_PIECE = 1 << 16  # the capacity of a pipe
TAIL = 1 << 14
"""Bytes of the output that are kept."""
_MARGIN = 1 << 12  # bytes of a truncated tail that are not shown
_SHOWN_LINES = 3
_SHOWN_CHARACTERS = 200
_ENDING_S = 0.2  # a process closes its files a moment before it has ended
_ROUND_S = 0.002


class WorkerLost(Exception):  # noqa: N818 - the worker is lost, and the supervisor has no error
    """The worker gave no valid reply, and must be replaced before the next response."""

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault  # timeout or error


@dataclass(kw_only=True)
class ChildProcess:
    """A process that works for the supervisor."""

    connection: socket.socket
    inbox: Inbox
    output: int  # the pipe with what it prints
    pid: int = 0  # 0: not known yet
    fork_server: "ChildProcess | None" = None  # the process that forked it, and reaps it; None: the supervisor did
    loaded: frozenset[int] = frozenset()  # itself and its processes after it loaded the rules
    num_threads: int = 1  # after it loaded the rules
    printed: bytes = b""  # the end of its output for this response
    is_over: bool = False  # the fork server has reaped it
    exit_code: int | None = None  # negative for a signal; None: unknown

    def drain(self) -> bool:
        """Read the output; return whether more may come later."""
        try:
            piece = os.read(self.output, _PIECE)
        except BlockingIOError:
            return True
        self.printed = (self.printed + piece)[-TAIL:]
        return bool(piece)

    def read(self) -> None:
        """Read what has arrived on the connection. Raises WorkerLost if the process has hung up."""
        try:
            self.inbox.read()
        except (EOFError, OSError):
            raise WorkerLost("error", self.how_it_ended()) from None

    def take(self) -> object:
        """Return the next message; None if it is incomplete. Raises WorkerLost if it is none."""
        try:
            return self.inbox.take()
        except ValueError as error:
            raise WorkerLost("error", f"its process sent {error}") from None

    def has_ended(self, *, within_s: float = 0.0) -> bool:
        """Return whether the process has ended, after at most `within_s` seconds."""
        if self.fork_server:
            return self._is_reaped(within_s)
        deadline = time.monotonic() + within_s
        while (ending := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_ROUND_S)
        self.exit_code = ending.si_status if ending.si_code == os.CLD_EXITED else -ending.si_status
        return True

    def how_it_ended(self) -> str:
        """Describe the end of a process that has closed its connection."""
        if not self.has_ended(within_s=_ENDING_S):
            return "its process closed the connection"
        if self.exit_code is None:
            return "its process ended"
        if self.exit_code >= 0:
            return f"its process ended (exit code {self.exit_code})"
        return f"its process was ended by signal {-self.exit_code} ({signal.strsignal(-self.exit_code)})"

    def text(self) -> str:
        """Return the end of the output, without secrets."""
        self.drain()
        return text_of(self.printed)

    def kill(self) -> None:
        """Kill the process and its group, even while it forks, and close what belongs to it."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connection and the output."""
        self.connection.close()
        os.close(self.output)

    def _is_reaped(self, within_s: float) -> bool:
        """Return whether the fork server has reaped this process, and learn how it ended."""
        assert self.fork_server, "nothing but a fork server reports the end of a process"
        deadline = time.monotonic() + within_s
        while not self.is_over:
            message = self.fork_server.take()
            if isinstance(message, dict):
                self.exit_code = message.get("ended")
                self.is_over = True
            elif is_readable(self.fork_server.connection, within_s=deadline - time.monotonic()):
                self.fork_server.read()
            else:
                break
        return self.is_over


def is_readable(source: socket.socket, *, within_s: float) -> bool:
    """Wait at most `within_s` seconds until something arrives; return whether it has."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(max(0, math.ceil(within_s * 1000))))


def text_of(printed: bytes) -> str:
    """Return the kept end of an output without secrets; of a cut output, leave out what may be half a secret."""
    text = redact(printed.decode(errors="replace"))
    return text[_MARGIN:] if len(printed) == TAIL else text


def last_lines(text: str) -> str:
    """Return the last lines of an output, for a message; empty if there are none."""
    lines = [line.strip()[-_SHOWN_CHARACTERS:] for line in text.split("\n") if line.strip()]
    return f"; it printed {' | '.join(lines[-_SHOWN_LINES:])!r}" if lines else ""
