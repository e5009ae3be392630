"""SIGTERM, SIGUSR1, SIGINT and SIGHUP request a stop: the job finishes its step, saves, and can be resumed.

Slurm sends them before an allocation ends, a container runtime when it stops the container, a person with Ctrl-C, a
terminal when it is closed. A job under `nohup` ignores SIGHUP. A rank only notes the signal. After each step the ranks
agree whether any of them got one, so that all stop after the same step. Outside of the steps there is nothing to save:
there, and on a second SIGTERM or SIGINT, a rank ends at once.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch
import torch.distributed as dist

from megarl.distributed.exchange import all_reduce
from megarl.platform.early import EXIT_CODE, SIGNALS, end_at_once, local_rank, write_warning
from megarl.platform.processes import children

__all__ = ["EXIT_CODE", "SIGNALS", "Stopped", "forward", "graceful_stop", "listen", "stop_requested"]

ECHO_S = 5.0
"""Signals within these seconds count as one: some senders signal both a launcher and its ranks."""
_IMMEDIATE = (signal.SIGTERM, signal.SIGINT)
"""Signals whose repetition ends the job at once. A terminal that closes may send several SIGHUP."""


class Stopped(Exception):  # noqa: N818 - nothing is wrong
    """All ranks stop after `step` finished steps, which are saved, because a signal requested it."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped by a signal, step {step} is saved")
        self.step = step


_is_graceful = False
_is_requested = False
_ending = threading.Lock()
_listener: tuple[threading.Thread, int] | None = None  # and the end of the pipe into which Python writes signals


def forward() -> None:
    """Forward SIGNALS, from now on, to the ranks that this process started and watches. Linux only."""
    global _is_requested
    _is_requested = False
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, _forward)


def listen() -> None:
    """Obey SIGNALS from now on: end this process with EXIT_CODE, at once or, within `graceful_stop`, after a save."""
    global _is_requested, _listener
    _end_listener()
    _is_requested = False
    for number in SIGNALS:
        signal.signal(number, _handle)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    thread = threading.Thread(target=_listen, args=[read_end], name="megarl-signals", daemon=True)
    thread.start()
    _listener = thread, write_end
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)


@contextmanager
def graceful_stop() -> Iterator[None]:
    """Within the block, let a signal only request a stop, which `stop_requested` reports. `Stopped` ends the job."""
    global _is_graceful
    _is_graceful = True
    try:
        yield
    except Stopped:
        for number in SIGNALS:  # all ranks stop already; a launcher sends more signals when the first rank has ended
            signal.signal(number, signal.SIG_IGN)
        raise
    finally:
        _is_graceful = False


def stop_requested() -> bool:
    """Return whether any rank got a signal, the same on all ranks. Collective if there are ranks."""
    if not dist.is_initialized():
        return _is_requested
    any_requested = torch.tensor(int(_is_requested))
    all_reduce(any_requested, op=dist.ReduceOp.MAX)
    return bool(any_requested.item())


def _forward(number: int, frame: FrameType | None) -> None:
    global _is_requested
    ranks = [pid for pid in children() if os.getpgid(pid) == pid]  # each rank leads a process group
    if not ranks:
        end_at_once(number, frame)
    if number == signal.SIGINT and _is_requested:  # a terminal signals only this process, once for each Ctrl-C
        write_warning(
            "SIGINT again: the job ends now, without this step; the same command resumes from the last checkpoint"
        )
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        os._exit(128 + number)
    _is_requested = _is_requested or number == signal.SIGINT
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _handle(number: int, frame: FrameType | None) -> None:
    global _is_requested
    if not _is_graceful:
        _end(number)
    _is_requested = True


def _end(number: int) -> None:
    """End this process at once; two threads may come here."""
    if _ending.acquire(blocking=False):
        end_at_once(number, None)
    time.sleep(ECHO_S)  # the other thread is about to end the process


def _end_listener() -> None:
    """End the thread of an earlier `listen` after it has read the signals of its time."""
    signal.set_wakeup_fd(-1)
    if _listener and _listener[0].is_alive():  # no thread survives a fork
        thread, write_end = _listener
        os.close(write_end)
        thread.join()


def _listen(read_end: int) -> None:
    """Report a requested stop; end this process if it is outside of its steps, or on a second request.

    This is a thread because the main thread may be in a collective, and leave it late or never.
    """
    first: float | None = None
    has_reported = False
    while number := os.read(read_end, 1):
        if number[0] not in SIGNALS:
            continue
        if not (_is_graceful or _is_requested):
            _end(number[0])
        if not has_reported and local_rank() == "0":
            hint = "; a second one ends the job at once" if number[0] in _IMMEDIATE else ""
            write_warning(f"{signal.Signals(number[0]).name}: the job ends when this step is saved{hint}")
            has_reported = True
        if number[0] in _IMMEDIATE:
            now = time.monotonic()
            if first is not None and now - first > ECHO_S:
                os._exit(128 + number[0])
            first = first or now
    os.close(read_end)
