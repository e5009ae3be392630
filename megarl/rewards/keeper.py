"""A process that supervises a worker that calls rewards, and replies for every response whatever the worker does.

Runs as `python -m megarl.rewards.keeper SOCKET PARENT`, started by a rank (`megarl.rewards.pool`). The keeper is small
and has one thread, so it can fork its worker; it calls no reward itself. Invariants:

- Every request gets a reply, within its time limit and a little more. A request for several responses may get an empty
  one: then each response is to be tried alone, because the call failed and the cause may be any of them.
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
from megarl.rewards.calls import Callee
from megarl.rewards.results import is_number
from megarl.rewards.rules import Rules
from megarl.rewards.wire import Inbox, encode
from megarl.rewards.worker import RANK_ENDED, serve

UNHEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that a keeper and its worker ignore; programs that a reward starts receive them."""
START_S = 120.0
"""Seconds that a worker may take to load its rules, and the modules that built-in rules import at their first call."""
CLEAN_S = 5.0
"""Seconds to wait for the end of processes that a reward left running, before the next reward is called."""
MAX_PROCESSES = 64
"""Most descendants of one keeper, its worker included."""
CANCEL_S = 2.0
"""Seconds, after the limit, in which a call for several responses may end those that are late."""
MAX_REPLY_BYTES = 1 << 16
"""Most bytes of the reply for one response."""
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

    def __init__(
        self, rank: socket.socket, *, rules: Callee, timeout_s: float, max_memory: int, num_together: int
    ) -> None:
        self._rank = rank
        self._rules = rules
        self._timeout_s = timeout_s
        self._max_memory = max_memory
        self._num_together = num_together
        self._worker: Worker | None = None
        self._is_lost = False
        self._ids = count()
        self._begun = 0.0  # when the worker began with the current request

    def judge(self, samples: Sequence[Any]) -> list[dict[str, Any]]:
        """Return `numbers` and `pred` of each response, or `fault` and `detail`; always the `seconds` of the call.

        The list is empty if the call for several responses failed: each has to be tried alone.
        """
        replies = self._try(samples)
        if self._is_lost and replies and replies[0]["fault"] == "error":  # an earlier response may be the cause
            self.end(within_s=CLEAN_S)
            replies = self._try(samples)
        return replies

    def _try(self, samples: Sequence[Any]) -> list[dict[str, Any]]:
        self._begun = time.monotonic()
        try:
            replies = self._ask(self._worker or self._start(), samples)
        except WorkerLost as lost:
            self._is_lost = True
            replies = [{"fault": lost.fault, "detail": str(lost)}]
        seconds = time.monotonic() - self._begun
        if len(replies) != len(samples):
            return []
        if self._worker and any("fault" in reply for reply in replies):
            self._worker.drain()
            printed = _last_lines(self._worker.printed)
            replies = [
                reply | {"detail": reply["detail"] + printed} if "fault" in reply else reply for reply in replies
            ]
        return [reply | {"seconds": seconds} for reply in replies]

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
                serve(
                    theirs,
                    printed,
                    self._rules,
                    timeout_s=self._timeout_s,
                    max_memory=self._max_memory,
                    keeper=keeper,
                )
            except Exception:
                sys.excepthook(*sys.exc_info())  # the warning shows these last lines
            finally:
                os._exit(1)
        theirs.close()
        os.close(printed)
        os.set_blocking(output, False)
        ours.settimeout(START_S)
        inbox = Inbox(ours, max_bytes=MAX_REPLY_BYTES * self._num_together)
        worker = Worker(pid=pid, connection=ours, inbox=inbox, output=output)
        self._worker = worker
        reply = self._wait(worker, WorkerLost("error", f"its rules did not load in {START_S:g} s"), START_S)
        if "ready" not in reply:
            raise WorkerLost("error", str(reply.get("error")))
        worker.loaded = frozenset([pid, *descendants()])
        return worker

    def _ask(self, worker: Worker, samples: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the reply for each response, or one fault of the entire call."""
        worker.printed = b""
        number = next(self._ids)
        unstarted = WorkerLost("error", f"its process did not start with it in {START_S:g} s")
        try:
            worker.connection.sendall(encode({"id": number, "samples": samples}))
        except TimeoutError:
            raise unstarted from None
        except OSError:
            raise WorkerLost("error", _how_it_ended(worker.pid)) from None
        reply = self._wait(worker, unstarted, START_S)
        late_detail = f"it took longer than {self._rules.section}.timeout_s={self._timeout_s:g}"
        if reply == {"id": number, "begun": True}:
            self._begun = time.monotonic()
            limit_s = self._timeout_s + (CANCEL_S if self._num_together > 1 else 0.0)
            reply = self._wait(worker, WorkerLost("timeout", late_detail), limit_s)
        match reply:
            case {"id": found, "error": str(detail)} if found == number:
                return [{"fault": "error", "detail": detail}]
            case {"id": found, "results": list(results)} if found == number and len(results) == len(samples):
                return [_checked(result, late_detail) for result in results]
        raise _invalid()

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


def _checked(result: Any, late_detail: str) -> dict[str, Any]:
    """Return the reply for a response. Raises WorkerLost if the worker sent something else."""
    match result:
        case {"late": True}:
            return {"fault": "timeout", "detail": late_detail}
        case {"error": str(detail)}:
            return {"fault": "error", "detail": detail}
        case {"numbers": {"score": float()} as numbers, "pred": str() | None as pred}:
            if all(isinstance(value, float) and is_number(value) for value in numbers.values()):
                return {"numbers": numbers, "pred": pred}
    raise _invalid()


def _invalid() -> WorkerLost:
    return WorkerLost("error", "its process sent an invalid reply")


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

    signal.signal(RANK_ENDED, leave)  # an exception here could interrupt the clean-up after a hang-up
    die_with_parent(RANK_ENDED, parent=int(argv[1]))
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
