"""A process that has rewards called by a worker, and answers for each response whatever the worker does.

Runs as `python -m megarl.rewards.keeper SOCKET PARENT`, started by a rank (`megarl.rewards.pool`). It forks its worker
from itself, small and with one thread, and calls no reward. Invariants: every request gets an answer, within its time
and a little more; between two requests nothing lives below this process but the worker and what it started while it
loaded its rules; when this process ends, nothing is left below it (but by SIGKILL: then the worker alone dies with it).
"""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NoReturn

from megarl.platform.processes import adopt_orphans, descendants, die_with_parent, end_descendants
from megarl.platform.secrets import redact
from megarl.rewards.rules import Rules, is_number
from megarl.rewards.wire import Inbox, encode
from megarl.rewards.worker import serve

UNHEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that end neither a keeper nor its worker; the programs that a reward starts hear them."""
START_S = 120.0
"""How long a worker may take to load its rules, and what built-in ones import when they are first called."""
CLEAN_S = 5.0
"""How long the end of what a reward left behind is waited for, before the next one is called."""
MAX_PROCESSES = 64
"""Below one keeper, its worker included."""
MAX_REPLY_BYTES = 1 << 16
_POLL_S = 0.1
_PIECE = 1 << 16  # all that a pipe holds
_TAIL = 1 << 14  # what is kept of it
_MARGIN = 1 << 12  # of a longer output so much of the tail is not shown, as half a secret is not found
_SHOWN_LINES, _SHOWN_CHARACTERS = 3, 200


class WorkerLost(Exception):  # noqa: N818 - the worker is; nothing is wrong with us
    """The worker gave no answer, and is not to be trusted with another response."""

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault  # timeout or error


@dataclass(kw_only=True)
class Worker:
    """A worker as its keeper sees it."""

    pid: int
    connection: socket.socket
    inbox: Inbox
    output: int  # the pipe with what it prints
    loaded: frozenset[int] = frozenset()  # the processes that there were when its rules were loaded, itself included
    printed: bytes = b""  # the end of what it printed for this response

    def drain(self) -> bool:
        """Read what it printed; whether there may be more one day."""
        try:
            piece = os.read(self.output, _PIECE)
        except BlockingIOError:
            return True
        self.printed = (self.printed + piece)[-_TAIL:]
        return bool(piece)


class Keeper:
    """One worker at a time, replaced where it is lost."""

    def __init__(self, rank: socket.socket, *, rules: Rules, timeout_s: float, max_memory: int) -> None:
        self._rank = rank
        self._rules = rules
        self._timeout_s = timeout_s
        self._max_memory = max_memory
        self._worker: Worker | None = None
        self._is_lost = False
        self._ids = count()
        self._begun = 0.0  # when the worker began with the present response

    def judge(self, arguments: Any) -> dict[str, Any]:
        """The `numbers` and `pred` of one response, or `fault` and `detail`; always the `seconds` it took."""
        answer = self._try(arguments)
        if self._is_lost and answer["fault"] == "error":  # perhaps by what an earlier response did, or from outside
            self.end(within_s=CLEAN_S)
            answer = self._try(arguments)
        return answer

    def _try(self, arguments: Any) -> dict[str, Any]:
        self._begun = time.monotonic()
        try:
            answer = self._ask(self._worker or self._start(), arguments)
        except WorkerLost as lost:
            self._is_lost = True
            answer = {"fault": lost.fault, "detail": str(lost)}
        seconds = time.monotonic() - self._begun
        if "fault" in answer and self._worker:
            self._worker.drain()
            answer["detail"] += _last_lines(self._worker.printed)
        return answer | {"seconds": seconds}

    def clean(self) -> None:
        """End what the last response left: an unsound worker, and every process that was not there before."""
        worker = self._worker
        sound = worker and not self._is_lost and _ending(worker.pid) is None
        if not (worker and sound and end_descendants(spare=worker.loaded, within_s=CLEAN_S)):
            self.end(within_s=CLEAN_S)

    def end(self, *, within_s: float | None = None) -> None:
        """End everything below this process."""
        worker, self._worker, self._is_lost = self._worker, None, False
        if worker:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # at one stroke, also where more of it are being forked
            worker.connection.close()
            os.close(worker.output)
        end_descendants(within_s=within_s)
        with suppress(ChildProcessError):  # where the kernel does not list it
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
                sys.excepthook(*sys.exc_info())  # for the warning's last words
            finally:
                os._exit(1)
        theirs.close()
        os.close(printed)
        os.set_blocking(output, False)
        ours.settimeout(START_S)
        worker = Worker(pid=pid, connection=ours, inbox=Inbox(ours, max_bytes=MAX_REPLY_BYTES), output=output)
        self._worker = worker
        answer = self._wait(worker, WorkerLost("error", f"its rules did not load in {START_S:g} s"), START_S)
        if "ready" not in answer:
            raise WorkerLost("error", str(answer.get("error")))
        worker.loaded = frozenset([pid, *descendants()])
        return worker

    def _ask(self, worker: Worker, arguments: Any) -> dict[str, Any]:
        worker.printed = b""
        number = next(self._ids)
        deaf = WorkerLost("error", f"its process did not begin with it in {START_S:g} s")
        try:
            worker.connection.sendall(encode({"id": number, "arguments": arguments}))
        except TimeoutError:
            raise deaf from None
        except OSError:
            raise WorkerLost("error", _how_it_ended(worker.pid)) from None
        answer = self._wait(worker, deaf, START_S)
        if answer == {"id": number, "begun": True}:
            self._begun = time.monotonic()
            late = WorkerLost("timeout", f"it took longer than reward_model.timeout_s={self._timeout_s:g}")
            answer = self._wait(worker, late, self._timeout_s)
        match answer:
            case {"id": found, "error": str(detail)} if found == number:
                return {"fault": "error", "detail": detail}
            case {"id": found, "numbers": {"score": float()} as numbers, "pred": str() | None as pred}:
                if found == number and all(isinstance(value, float) and is_number(value) for value in numbers.values()):
                    return {"numbers": numbers, "pred": pred}
        raise WorkerLost("error", "its process gave an answer that is none")

    def _wait(self, worker: Worker, late: WorkerLost, seconds: float) -> dict[str, Any]:
        """The worker's next message; `late` where it takes longer."""
        sources = [worker.connection.fileno(), worker.output, self._rank.fileno()]
        now = time.monotonic()
        deadline, next_look = now + seconds, now + _POLL_S
        while True:
            if isinstance(message := _take(worker), dict):
                return message
            ready, _, _ = select.select(sources, [], [], max(0.0, min(deadline, next_look) - now))
            now = time.monotonic()
            if self._rank.fileno() in ready:  # it waits for an answer, so it has hung up
                sys.exit()
            if worker.output in ready and not worker.drain():
                sources.remove(worker.output)
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
        raise WorkerLost("error", f"its process answered {error}") from None


def _look_at(worker: Worker) -> None:
    if _ending(worker.pid) is not None:  # a process that it forked may hold its files open
        raise WorkerLost("error", _how_it_ended(worker.pid))
    if len(list(islice(descendants(), MAX_PROCESSES + 1))) > MAX_PROCESSES:
        raise WorkerLost("error", f"it started more than {MAX_PROCESSES} processes")


def _ending(pid: int) -> os.waitid_result | None:
    """How a child ended; None where it has not."""
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


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Answer the rank until it hangs up."""
    rank = socket.socket(fileno=int(argv[0]))
    keeper: Keeper | None = None

    def leave(*_: object) -> NoReturn:
        if keeper:
            keeper.end()
        os._exit(0)

    signal.signal(signal.SIGHUP, leave)  # it raises nothing: that could cut short what a hang-up has begun to end
    die_with_parent(signal.SIGHUP, parent=int(argv[1]))
    for number in UNHEARD:  # launchers tell every process of a job to end; the rank decides when
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that a reward starts would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNHEARD)  # the rank has blocked them until here
    adopt_orphans()
    inbox = Inbox(rank, max_bytes=sys.maxsize)
    try:
        with suppress(EOFError, ConnectionError):  # a rank that needs no more hangs up
            settings = inbox.wait()
            keeper = Keeper(rank, **settings | {"rules": Rules(**settings["rules"])})
            while True:
                rank.sendall(encode(keeper.judge(inbox.wait())))
                keeper.clean()
    finally:
        if keeper:
            keeper.end()


if __name__ == "__main__":
    main()
