"""The processes of one rank that call rewards: supervisors, each with a worker, as many as the work needs.

A rank may hold a CUDA context and many threads, so it never forks: supervisors are started as new programs. They
exchange text and numbers with the rank; the rank runs and unpickles nothing that they send.
"""

import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megarl.platform.log import printed
from megarl.sandbox import signals
from megarl.sandbox.canary import MAX_CALLS
from megarl.sandbox.limits import WorkerLimits as WorkerLimits
from megarl.sandbox.protocol import Callee
from megarl.sandbox.results import Numbers
from megarl.sandbox.supervisor import CLEAN_S, START_S
from megarl.sandbox.wire import Inbox, encode

MAX_SUPERVISORS = 2
"""Most supervisors that are tried with one response: the first may have ended for another reason."""
PATIENCE_S = 0.25
"""Seconds that a response waits for a process before another process is started."""
LONG_S = 0.05
"""Seconds of scoring of each process that someone waits for, before another process is started."""
_ESCAPED = 4
"""Most bytes in the supervisor's JSON of a byte in the worker's, which may have characters without escapes."""
_MAX_PRINTED_BYTES = 1 << 20  # with the seconds and the fault
_SLACK_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ScoringResult:
    """The result of scoring one response."""

    seconds: float
    numbers: Numbers = field(default_factory=dict)  # empty if there is a fault
    pred: str | None = None  # the extracted answer, see `RuleResult`
    fault: Literal["timeout", "error", "canary"] | None = None
    detail: str = ""  # of the fault, for people: its cause, and the end of what was printed
    cause: str = ""


def failed(error: Exception) -> Future[ScoringResult]:
    """Return a result that raises this error when it is read."""
    result: Future[ScoringResult] = Future()
    result.set_exception(error)
    return result


@dataclass(frozen=True, eq=False)
class _Task:
    """A response that waits for a process."""

    since: float  # by `time.monotonic`
    arguments: object
    result: Future[ScoringResult]
    is_alone: bool  # a call for it and others has failed


class Pool:
    """Calls rules in separate processes. Every response gets a result, in bounded time."""

    def __init__(self, rules: Callee, limits: WorkerLimits, *, takes_ids: bool = False, held_s: float = 0.0) -> None:
        """Start no process yet.

        Args:
            rules: to call.
            limits: of the processes.
            takes_ids: whether the arguments of each response have its `solution_ids`.
            held_s: responses whose scoring takes less, all together, wait for others until someone waits for results.
        """
        self.takes_ids = takes_ids
        self._held_s = held_s
        self._rules = rules
        self._limits = limits
        self._waiting = deque[_Task]()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._awaited_since: float | None = None  # by `time.monotonic`; None: nobody waits for results
        self._seconds_of_one = math.inf  # in the last call of a process that had loaded the rules

    def submit(self, arguments: object) -> Future[ScoringResult]:
        """Call the rules as soon as a process is free, with arguments that `wire.pack` made."""
        future: Future[ScoringResult] = Future()
        with self._changed:
            self._waiting.append(_Task(time.monotonic(), arguments, future, is_alone=False))
            self._awaited_since = None
            self._changed.notify()
        self._grow()
        return future

    def wait(self, futures: Sequence[Future[ScoringResult]]) -> list[ScoringResult]:
        """Wait for all results and return them."""
        while self.count_pending(futures, within_s=PATIENCE_S):
            pass
        return [future.result() for future in futures]

    def count_pending(self, futures: Sequence[Future[ScoringResult]], *, within_s: float) -> int:
        """Wait for results for `within_s` seconds at most; return how many are still pending."""
        deadline = time.monotonic() + within_s
        with self._changed:
            if self._awaited_since is None:
                self._awaited_since = time.monotonic()
                self._changed.notify_all()
        while True:
            self._grow()
            pending = wait(futures, timeout=max(0.0, min(PATIENCE_S, deadline - time.monotonic()))).not_done
            if not pending:
                return 0
            if time.monotonic() >= deadline:
                return len(pending)

    def close(self) -> None:
        """End all processes; responses that were not started have no result."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _grow(self) -> None:
        """Start a process if there is none, or if the processes cannot keep up or someone would wait for long."""
        with self._changed:
            since = max(self._waiting[0].since, self._awaited_since or 0.0) if self._is_due() else math.inf
            is_late = time.monotonic() - since > PATIENCE_S
            is_long = self._awaited_since is not None and LONG_S * len(self._threads) < self._work_s() < math.inf
            if not self._threads or ((is_late or is_long) and len(self._threads) < self._limits.num_workers):
                # the kernel ends a supervisor with the thread that started it, so each supervisor has its own thread
                self._threads.append(threading.Thread(target=self._work, name="rewards", daemon=True))
                self._threads[-1].start()

    def _is_due(self) -> bool:
        """Return whether waiting responses are to be scored now."""
        if not self._waiting:
            return False
        return self._awaited_since is not None or self._work_s() >= self._held_s

    def _work_s(self) -> float:
        """Return the seconds that one process needs to score what waits; infinite until one has called loaded rules."""
        return len(self._waiting) * self._seconds_of_one if self._waiting else 0.0

    def _work(self) -> None:
        supervisor = None
        tasks = self._next()
        while tasks:
            has_loaded = supervisor is not None
            begun = time.monotonic()
            supervisor, results = self._call(supervisor, [task.arguments for task in tasks])
            if has_loaded:
                self._seconds_of_one = (time.monotonic() - begun) / len(tasks)
            if len(results) == len(tasks):
                for task, result in zip(tasks, results, strict=True):
                    task.result.set_result(result)
            else:
                with self._changed:
                    self._waiting.extendleft(replace(task, is_alone=True) for task in reversed(tasks))
                    self._changed.notify_all()
            tasks = self._next()
        if supervisor:
            supervisor.close()

    def _call(
        self, supervisor: "_Supervisor | None", samples: Sequence[object]
    ) -> "tuple[_Supervisor | None, list[ScoringResult]]":
        """Return the supervisor for the next request, and the results of this one. Replace one that has ended once.

        There are no results if the call for several responses failed, and each has to be tried alone.
        """
        failures = list[str]()
        while len(failures) < MAX_SUPERVISORS:
            try:
                supervisor = supervisor or _Supervisor(self._rules, self._limits)
                return supervisor, supervisor.call(samples)
            except Exception as error:  # a caller waits for the result, whatever the error
                failures.append(f"{type(error).__name__}: {error}")
                if supervisor:
                    supervisor.close()
                supervisor = None
                if len(samples) > 1:
                    return None, []
                if not isinstance(error, EOFError | ConnectionError):  # it hangs, and has used its time
                    break
        detail = f"the process that watches over rewards failed ({failures[-1]})"
        return None, [ScoringResult(seconds=0.0, fault="error", detail=detail)]

    def _next(self) -> list[_Task]:
        """Wait for responses that a process can handle at once, and take them; none if the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_due() or self._closed)
            if self._closed:
                return []
            tasks = [self._waiting.popleft()]
            while (
                not tasks[0].is_alone
                and len(tasks) < self._limits.num_together
                and self._waiting
                and not self._waiting[0].is_alone
            ):
                tasks.append(self._waiting.popleft())
            return tasks


class _Supervisor:
    """The rank's connection to a supervisor."""

    def __init__(self, rules: Callee, limits: WorkerLimits) -> None:
        self._connection, theirs = socket.socketpair()
        num_calls = 2 + (MAX_CALLS if limits.canary_every else 0)
        self._connection.settimeout(num_calls * (2 * START_S + limits.timeout_s + CLEAN_S) + _SLACK_S)
        max_reply = _ESCAPED * limits.max_reply + _MAX_PRINTED_BYTES
        self._inbox = Inbox(self._connection, max_bytes=max_reply * limits.num_together)
        search_path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)  # rewards import what the rank can
        with theirs, signals.blocked():  # the supervisor inherits the mask, and unblocks once its handlers are set
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", rules.supervisor, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # a signal to the rank's group must leave the supervisor time to clean up
            )
        settings = {"rules": asdict(rules), "limits": asdict(limits)}
        self._connection.sendall(encode(settings))

    def call(self, samples: Sequence[object]) -> list[ScoringResult]:
        """Return what `supervisor.Supervisor.call` does, and record what it printed.

        Raises:
            OSError, EOFError or UserError: the supervisor is lost.
        """
        self._connection.sendall(encode(samples))
        replies = self._inbox.wait()
        for text in filter(str.strip, [reply.pop("printed") for reply in replies]):
            printed.info("%s", text.rstrip("\n"))
        return [ScoringResult(**reply | _whole_characters(reply)) for reply in replies]

    def close(self) -> None:
        """Hang up; the supervisor then ends its descendants and itself."""
        self._connection.close()
        try:
            self._process.wait(2 * CLEAN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLEAN_S)


def _whole_characters(reply: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a reply with `?` for each half of a character: no file of UTF-8 can hold one."""
    texts = {name: reply.get(name) for name in ("pred", "detail", "cause")}
    return {name: text.encode(errors="replace").decode() for name, text in texts.items() if text}
