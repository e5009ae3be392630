"""A process that supervises a worker that calls rewards, and replies for every response whatever the worker does.

Runs as `python -m megarl.rewards.keeper SOCKET PARENT`, started by a rank (`megarl.rewards.pool`). The keeper is small
and has one thread, so it can fork its worker; it calls no reward itself. Invariants:

- Every request gets a reply, within its time limit and a little more.
- Between two requests the keeper has no descendants except the worker and the processes that the worker started while
  it loaded its rules.
- When the keeper ends, it leaves no descendants. (After SIGKILL, only the worker is sure to end with it.)
"""

import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NoReturn

from megarl.platform.processes import adopt_orphans, descendants, die_with_parent, end_descendants
from megarl.platform.secrets import redact
from megarl.rewards.rules import Callee, Rules, is_number
from megarl.rewards.wire import Inbox, encode
from megarl.rewards.worker import serve

UNHEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that a keeper and its worker ignore; programs that a reward starts receive them."""
START_S = 120.0
"""Seconds that a worker may take to load its rules, and the modules that built-in rules import at their first call."""
CLEAN_S = 5.0
"""Seconds to wait for the end of processes that a reward left running, before the next reward is called."""
MAX_PROCESSES = 64
"""Most descendants of one keeper, its worker included."""
MAX_REPLY_BYTES = 1 << 16
_POLL_S = 0.1
_PIECE = 1 << 16  # the capacity of a pipe
_TAIL = 1 << 14  # bytes of the output that are kept
_MARGIN = 1 << 12  # bytes of a truncated tail that are not shown: half a secret would not be recognised
_SHOWN_LINES, _SHOWN_CHARACTERS = 3, 200


class WorkerLost(Exception):  # noqa: N818 - the worker is lost, and the keeper has no error
    """The worker gave no valid reply, and must be replaced before the next response."""

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault  # timeout or error


@dataclass(kw_only=True)
class Worker:
    """The keeper's record of its worker."""

    pid: int
    connection: socket.socket
    inbox: Inbox
    output: int  # the pipe with the worker's output
    loaded: frozenset[int] = frozenset()  # the worker and its processes after it loaded its rules
    printed: bytes = b""  # the end of its output for this response

    def drain(self) -> bool:
        """Read the worker's output; return whether more may come later."""
        try:
            piece = os.read(self.output, _PIECE)
        except BlockingIOError:
            return True
        self.printed = (self.printed + piece)[-_TAIL:]
        return bool(piece)


class Keeper:
    """Runs one worker at a time, and replaces a worker that is lost."""

    def __init__(self, rank: socket.socket, *, rules: Callee, timeout_s: float, max_memory: int) -> None:
        self._rank = rank
        self._rules = rules
        self._timeout_s = timeout_s
        self._max_memory = max_memory
        self._worker: Worker | None = None
        self._is_lost = False
        self._ids = count()
        self._begun = 0.0  # when the worker began with the current response

    def judge(self, arguments: Any) -> dict[str, Any]:
        """Return `numbers` and `pred` of one response, or `fault` and `detail`; always the `seconds` it took."""
        reply = self._try(arguments)
        if self._is_lost and reply["fault"] == "error":  # an earlier response or another process may be the cause
            self.end(within_s=CLEAN_S)
            reply = self._try(arguments)
        return reply

    def _try(self, arguments: Any) -> dict[str, Any]:
        self._begun = time.monotonic()
        try:
            reply = self._ask(self._worker or self._start(), arguments)
        except WorkerLost as lost:
            self._is_lost = True
            reply = {"fault": lost.fault, "detail": str(lost)}
        seconds = time.monotonic() - self._begun
        if "fault" in reply and self._worker:
            self._worker.drain()
            reply["detail"] += _last_lines(self._worker.printed)
        return reply | {"seconds": seconds}

    def clean(self) -> None:
        """End an unsound worker, and every process that the last response left running."""
        worker = self._worker
        sound = worker and not self._is_lost and _ending(worker.pid) is None
        if not (worker and sound and end_descendants(spare=worker.loaded, within_s=CLEAN_S)):
            self.end(within_s=CLEAN_S)

    def end(self, *, within_s: float | None = None) -> None:
        """End all descendants of this process."""
        worker, self._worker, self._is_lost = self._worker, None, False
        if worker:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # the whole group at once, even while it forks
            worker.connection.close()
            os.close(worker.output)
        end_descendants(within_s=within_s)
        with suppress(ChildProcessError):  # if the kernel does not list the worker
            os.waitpid(-1, os.WNOHANG)

    def _start(self) -> Worker:
        ours, theirs = socket.socketpair()
        output, printed = os.pipe()
        keeper = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                self._rank.close()
                serve(theirs, printed, self._rules, max_memory=self._max_memory, keeper=keeper)
            except Exception:
                sys.excepthook(*sys.exc_info())  # the warning shows these last lines
            finally:
                os._exit(1)
        theirs.close()
        os.close(printed)
        os.set_blocking(output, False)
        ours.settimeout(START_S)
        worker = Worker(pid=pid, connection=ours, inbox=Inbox(ours, max_bytes=MAX_REPLY_BYTES), output=output)
        self._worker = worker
        reply = self._wait(worker, WorkerLost("error", f"its rules did not load in {START_S:g} s"), START_S)
        if "ready" not in reply:
            raise WorkerLost("error", str(reply.get("error")))
        worker.loaded = frozenset([pid, *descendants()])
        return worker

    def _ask(self, worker: Worker, arguments: Any) -> dict[str, Any]:
        worker.printed = b""
        number = next(self._ids)
        unstarted = WorkerLost("error", f"its process did not start with it in {START_S:g} s")
        try:
            worker.connection.sendall(encode({"id": number, "arguments": arguments}))
        except TimeoutError:
            raise unstarted from None
        except OSError:
            raise WorkerLost("error", _how_it_ended(worker.pid)) from None
        reply = self._wait(worker, unstarted, START_S)
        if reply == {"id": number, "begun": True}:
            self._begun = time.monotonic()
            late = WorkerLost("timeout", f"it took longer than {self._rules.section}.timeout_s={self._timeout_s:g}")
            reply = self._wait(worker, late, self._timeout_s)
        match reply:
            case {"id": found, "error": str(detail)} if found == number:
                return {"fault": "error", "detail": detail}
            case {"id": found, "numbers": {"score": float()} as numbers, "pred": str() | None as pred}:
                if found == number and all(isinstance(value, float) and is_number(value) for value in numbers.values()):
                    return {"numbers": numbers, "pred": pred}
        raise WorkerLost("error", "its process sent an invalid reply")

    def _wait(self, worker: Worker, late: WorkerLost, seconds: float) -> dict[str, Any]:
        """Return the worker's next message. Raises `late` if it takes longer than `seconds`."""
        sources = select.poll()  # `select.select` takes no numbers above 1023, and a rank of many ranks has more files
        for source in (worker.connection.fileno(), worker.output, self._rank.fileno()):
            sources.register(source, select.POLLIN)
        now = time.monotonic()
        deadline, next_look = now + seconds, now + _POLL_S
        while True:
            if isinstance(message := _take(worker), dict):
                return message
            pause_s = max(0.0, min(deadline, next_look) - now)
            ready = {source for source, _ in sources.poll(math.ceil(pause_s * 1000))}
            now = time.monotonic()
            if self._rank.fileno() in ready:  # the rank expects a reply, so it has hung up
                sys.exit()
            if worker.output in ready and not worker.drain():
                sources.unregister(worker.output)
            if worker.connection.fileno() in ready:
                _read(worker)
            elif now > deadline:
                raise late
            if now > next_look:
                _look_at(worker)
                next_look = now + _POLL_S


def _read(worker: Worker) -> None:
    try:
        worker.inbox.read()
    except (EOFError, OSError):
        raise WorkerLost("error", _how_it_ended(worker.pid)) from None


def _take(worker: Worker) -> Any:
    try:
        return worker.inbox.take()
    except ValueError as error:
        raise WorkerLost("error", f"its process sent {error}") from None


def _look_at(worker: Worker) -> None:
    if _ending(worker.pid) is not None:  # a process that it forked may hold its files open
        raise WorkerLost("error", _how_it_ended(worker.pid))
    if len(list(islice(descendants(), MAX_PROCESSES + 1))) > MAX_PROCESSES:
        raise WorkerLost("error", f"it started more than {MAX_PROCESSES} processes")


def _ending(pid: int) -> os.waitid_result | None:
    """Return how a child ended; None if it is running."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _how_it_ended(pid: int) -> str:
    for _ in range(100):  # a process closes its files a moment before it has ended
        if ending := _ending(pid):
            if ending.si_code == os.CLD_EXITED:
                return f"its process ended (exit code {ending.si_status})"
            return f"its process was ended by signal {ending.si_status} ({signal.strsignal(ending.si_status)})"
        time.sleep(0.002)
    return "its process closed the connection"


def _last_lines(printed: bytes) -> str:
    text = redact(printed.decode(errors="replace"))
    if len(printed) == _TAIL:
        text = text[_MARGIN:]
    lines = [line.strip()[-_SHOWN_CHARACTERS:] for line in text.split("\n") if line.strip()]
    return f"; it printed {' | '.join(lines[-_SHOWN_LINES:])!r}" if lines else ""


def main(argv: Sequence[str] = sys.argv[1:], *, kind: Callable[..., Callee] = Rules) -> None:
    """Serve the rank until it hangs up. The worker calls the `kind` with the settings that the rank sends."""
    rank = socket.socket(fileno=int(argv[0]))
    keeper: Keeper | None = None

    def leave(*_: object) -> NoReturn:
        if keeper:
            keeper.end()
        os._exit(0)

    signal.signal(signal.SIGHUP, leave)  # an exception here could interrupt the clean-up after a hang-up
    die_with_parent(signal.SIGHUP, parent=int(argv[1]))
    for number in UNHEARD:  # launchers signal every process of a job; the rank decides when it ends
        signal.signal(number, lambda *_: None)  # programs that a reward starts would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNHEARD)  # the rank has blocked them until here
    adopt_orphans()
    inbox = Inbox(rank, max_bytes=sys.maxsize)
    try:
        with suppress(EOFError, ConnectionError):  # a rank that has finished hangs up
            settings = inbox.wait()
            keeper = Keeper(rank, **settings | {"rules": kind(**settings["rules"])})
            while True:
                rank.sendall(encode(keeper.judge(inbox.wait())))
                keeper.clean()
    finally:
        if keeper:
            keeper.end()


if __name__ == "__main__":
    main()
