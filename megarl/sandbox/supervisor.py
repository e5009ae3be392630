"""A process that supervises a worker that calls rewards, and replies for every response whatever the worker does.

A rank starts it (`megarl.sandbox.pool`) as the program of what it calls: `python -m megarl.rewards.supervisor SOCKET
PARENT`. The supervisor is small and has one thread, so it can fork; it calls no reward itself. If requests are
isolated, it forks a fork server (`megarl.sandbox.fork_server`), which forks a worker for each request; if not, it forks
a worker for many. Invariants:

- Every request gets a reply, within its time limit and a little more. A request for several responses may get an empty
  one: then each response is to be tried alone, because the call failed and the cause may be any of them.
- Between two requests the supervisor has no descendants except the process that has loaded the rules and the processes
  that this one started while it loaded them.
- When the supervisor ends, it leaves no descendants. (After SIGKILL, only fork server and worker are sure to end with
  it.)
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
from itertools import count, islice
from typing import Any, NoReturn

from megarl.platform.processes import adopt_orphans, descendants, die_with_parent, end_descendants
from megarl.sandbox import signals
from megarl.sandbox.canary import Canary
from megarl.sandbox.fork_server import serve_forks
from megarl.sandbox.limits import WorkerLimits
from megarl.sandbox.process import ChildProcess, WorkerLost, is_readable, last_lines
from megarl.sandbox.protocol import Callee
from megarl.sandbox.results import is_number
from megarl.sandbox.wire import Inbox, encode
from megarl.sandbox.worker import serve

START_S = 120.0
"""Seconds that a process may take to load its rules, and the modules that built-in rules import at their first call."""
CLEAN_S = 5.0
"""Seconds to wait for the end of processes that a reward left running, before the next reward is called."""
MAX_PROCESSES = 64
"""Most descendants of one supervisor, its worker included."""
CANCEL_S = 2.0
"""Seconds, after the limit, in which a call for several responses may end those that are late."""
_POLL_S = 0.1
_THREADS = (
    "; its file starts threads when it is loaded, and no thread is in the process of a response (start them in the "
    "call, or set reward_model.isolation=process)"
)

Reply = dict[str, Any]
"""A message of a process: its values by name."""


class Supervisor:
    """Runs one worker at a time, and replaces a worker that is lost or has done its work."""

    def __init__(self, rank: socket.socket, *, rules: Callee, limits: WorkerLimits) -> None:
        self._rank = rank
        self._rules = rules
        self._limits = limits
        self._loaded: ChildProcess | None = None  # has loaded the rules: a fork server, or the worker itself
        self._worker: ChildProcess | None = None
        self._worker_failed = False
        self._ids = count()
        self._started_at = 0.0  # when the worker began with the current request
        self._canary = Canary(rules, self, every=limits.canary_every)

    def call(self, samples: Sequence[object]) -> list[Reply]:
        """Return `numbers` and `pred` of each response, or `fault` and `detail`; always the `seconds` of the call.

        The first of them also has what the call `printed`.

        The list is empty if the call for several responses failed: each has to be tried alone.
        """
        fault = self._canary.fault(samples[0])
        if fault:
            return [{"fault": "canary", "detail": fault, "seconds": 0.0, "printed": ""}] * len(samples)
        replies = self._try(samples)
        if self._worker_failed and replies and replies[0]["fault"] == "error":  # an earlier response may be the cause
            self.clean()
            replies = self._try(samples)
        return replies

    def score_alone(self, sample: object) -> float | None:
        """Return the score of one response, and clean up after it; None if it has none."""
        replies = self._try([sample])
        self.clean()
        return replies[0].get("numbers", {}).get("score")

    def _try(self, samples: Sequence[object]) -> list[Reply]:
        self._started_at = time.monotonic()
        try:
            replies = self._request(samples)
        except WorkerLost as lost:
            self._worker_failed = True
            replies = [{"fault": lost.fault, "detail": str(lost)}]
        seconds = time.monotonic() - self._started_at
        if len(replies) != len(samples):
            return []
        speaker = self._worker or self._loaded
        printed = speaker.text() if speaker else ""
        end = last_lines(printed)
        replies = [
            reply | {"detail": reply["detail"] + end, "cause": reply["detail"]} if "fault" in reply else reply
            for reply in replies
        ]
        replies = [reply | {"seconds": seconds, "printed": ""} for reply in replies]
        replies[0]["printed"] = printed
        return replies

    def clean(self) -> None:
        """End a worker that is unsound or has done its work, and every process that the last response left running."""
        loaded = self._loaded
        is_clear = not self._worker_failed
        if self._worker is not loaded:
            is_clear = self._end_borrowed()
        self._worker_failed = False
        sound = loaded and is_clear and not loaded.has_ended()
        if not (loaded and sound and end_descendants(spare=loaded.loaded, within_s=CLEAN_S)):
            self.end()

    def end(self, *, within_s: float | None = CLEAN_S) -> None:
        """End all descendants of this process."""
        helpers = {id(helper): helper for helper in (self._worker, self._loaded) if helper}
        self._worker = None
        self._loaded = None
        self._worker_failed = False
        for helper in helpers.values():
            helper.kill()
        end_descendants(within_s=within_s)
        with suppress(ChildProcessError):  # if the kernel does not list the worker
            os.waitpid(-1, os.WNOHANG)

    def _end_borrowed(self) -> bool:
        """End the worker that a fork server forked; return whether the fork server is ready for the next."""
        worker = self._worker
        self._worker = None
        if worker is None or worker.fork_server is None:
            return False
        worker.kill()
        if not worker.pid:  # it may still be to be forked
            return False
        worker.fork_server.drain()
        try:
            return worker.has_ended(within_s=CLEAN_S)
        except WorkerLost:  # the fork server is lost
            return False

    def _load(self) -> ChildProcess:
        """Fork a process that loads the rules."""
        run = serve_forks if self._limits.isolation == "response" else serve
        helper, theirs, printed = self._connected()
        supervisor = os.getpid()
        helper.pid = os.fork()
        if helper.pid == 0:
            try:
                helper.connection.close()
                self._rank.close()
                run(theirs, printed, self._rules, limits=self._limits, supervisor=supervisor)
            except Exception:
                sys.excepthook(*sys.exc_info())  # the warning shows these last lines
            finally:
                os._exit(1)
        theirs.close()
        os.close(printed)
        self._loaded = helper
        reply = self._wait(helper, WorkerLost("error", f"its rules did not load in {START_S:g} s"), START_S)
        if "ready" not in reply:
            raise WorkerLost("error", str(reply.get("error")))
        helper.loaded = frozenset([helper.pid, *descendants()])
        helper.num_threads = reply["threads"]
        return helper

    def _borrow(self, fork_server: ChildProcess) -> ChildProcess:
        """Return the worker that the fork server forks for its next request."""
        worker, theirs, printed = self._connected()
        worker.fork_server = fork_server
        try:
            socket.send_fds(fork_server.connection, [b"\0"], [theirs.fileno(), printed])
        except OSError:
            worker.hang_up()
            raise
        finally:
            theirs.close()
            os.close(printed)
        return worker

    def _connected(self) -> tuple[ChildProcess, socket.socket, int]:
        """Return a helper that is still to be forked, its end of the connection, and the pipe for what it prints."""
        ours, theirs = socket.socketpair()
        output, printed = os.pipe()
        os.set_blocking(output, False)
        ours.settimeout(START_S)
        inbox = Inbox(ours, max_bytes=self._limits.max_reply * self._limits.num_together)
        return ChildProcess(connection=ours, inbox=inbox, output=output), theirs, printed

    def _request(self, samples: Sequence[object]) -> list[Reply]:
        """Return the reply for each response, or one fault of the entire call."""
        loaded = self._loaded or self._load()
        loaded.printed = b""
        number = next(self._ids)
        unstarted = WorkerLost("error", f"its process did not start with it in {START_S:g} s")
        try:
            worker = self._borrow(loaded) if self._limits.isolation == "response" else loaded
            self._worker = worker
            loaded.connection.sendall(encode({"id": number, "samples": samples}))
        except TimeoutError:
            raise unstarted from None
        except OSError:
            raise WorkerLost("error", loaded.how_it_ended()) from None
        reply = self._wait(loaded, unstarted, START_S)
        late_detail = f"it took longer than {self._rules.section}.timeout_s={self._limits.timeout_s:g}"
        if worker is not loaded and loaded.num_threads > 1:
            late_detail += _THREADS
        pid = reply.get("started")
        if reply.get("id") == number and isinstance(pid, int):
            if worker is not loaded:  # a worker that this process forked is known, and may name another process
                worker.pid = pid
            self._started_at = time.monotonic()
            limit_s = self._limits.timeout_s + (CANCEL_S if self._limits.num_together > 1 else 0.0)
            reply = self._wait(worker, WorkerLost("timeout", late_detail), limit_s)
        match reply:
            case {"id": found, "error": str(detail)} if found == number:
                return [{"fault": "error", "detail": detail}]
            case {"id": found, "results": list(results)} if found == number and len(results) == len(samples):
                return [_checked(result, late_detail) for result in results]
        raise _invalid()

    def _wait(self, helper: ChildProcess, late: WorkerLost, seconds: float) -> Reply:
        """Return the helper's next message. Raises `late` if it takes longer than `seconds`."""
        sources = select.poll()  # `select.select` takes no numbers above 1023, and a rank of many ranks has more files
        for source in (helper.connection.fileno(), helper.output, self._rank.fileno()):
            sources.register(source, select.POLLIN)
        now = time.monotonic()
        deadline = now + seconds
        next_look = now + _POLL_S
        while True:
            message = helper.take()
            if isinstance(message, dict):
                return message
            pause_s = max(0.0, min(deadline, next_look) - now)
            ready = {source for source, _ in sources.poll(math.ceil(pause_s * 1000))}
            now = time.monotonic()
            if self._rank.fileno() in ready:  # the rank expects a reply, so it has hung up
                sys.exit()
            if helper.output in ready and not helper.drain():
                sources.unregister(helper.output)
            if helper.connection.fileno() in ready:
                helper.read()
            elif now > deadline:
                raise late
            if now > next_look:
                _check_helper(helper)
                next_look = now + _POLL_S


def _checked(result: object, late_detail: str) -> Reply:
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


def _check_helper(helper: ChildProcess) -> None:
    if helper.has_ended() and not is_readable(helper.connection, within_s=0.0):  # a fork of it may hold its files open
        raise WorkerLost("error", helper.how_it_ended())
    if len(list(islice(descendants(), MAX_PROCESSES + 1))) > MAX_PROCESSES:
        raise WorkerLost("error", f"it started more than {MAX_PROCESSES} processes")


def main(argv: Sequence[str] = sys.argv[1:], *, kind: Callable[..., Callee]) -> None:
    """Serve the rank until it hangs up. The worker calls the `kind` with the settings that the rank sends."""
    rank = socket.socket(fileno=int(argv[0]))
    supervisor: Supervisor | None = None

    def leave(*_: object) -> NoReturn:
        if supervisor:
            supervisor.end(within_s=None)
        os._exit(0)

    signal.signal(signals.RANK_ENDED, leave)  # an exception here could interrupt the clean-up after a hang-up
    die_with_parent(signals.RANK_ENDED, parent=int(argv[1]))
    signals.ignore()  # launchers signal every process of a job; the rank decides when it ends
    adopt_orphans()
    inbox = Inbox(rank, max_bytes=sys.maxsize)
    try:
        with suppress(EOFError, ConnectionError):  # a rank that has finished hangs up
            settings = inbox.wait()
            supervisor = Supervisor(rank, rules=kind(**settings["rules"]), limits=WorkerLimits(**settings["limits"]))
            while True:
                rank.sendall(encode(supervisor.call(inbox.wait())))
                supervisor.clean()
    finally:
        if supervisor:
            supervisor.end(within_s=None)
