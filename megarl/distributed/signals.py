"""SIGTERM, SIGUSR1 and SIGINT are the wish that a job ends: it finishes its step, saves, and can be started again.

They come from Slurm before the end of an allocation, from whatever stops a container, from people and their Ctrl-C. A
rank that is told only notes it; after each step the ranks ask one another, so that all end after the same one, whoever
was told. Outside of the steps there is nothing to save: there, and on a second SIGTERM or SIGINT, a rank ends at once.
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

from megarl.distributed.exchange import host_group
from megarl.platform.early import EXIT_CODE, SIGNALS, end_at_once, local_rank, say
from megarl.platform.processes import children

__all__ = ["EXIT_CODE", "SIGNALS", "Stopped", "forward", "heeding", "listen", "told"]

ECHO_S = 5.0
"""A second signal to a rank within these seconds is the first one, come by another way: some senders tell everybody."""
_AT_ONCE = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):  # noqa: N818 - nothing is wrong
    """A rank was told to end; all do, after `step` finished steps, which are saved."""

    def __init__(self, step: int) -> None:
        super().__init__(f"told to end, step {step} is saved")
        self.step = step


_heeding = False
_told = False
_ending = threading.Lock()


def forward() -> None:
    """Hand SIGNALS on, from now on, to the ranks that this process started and watches. Linux only."""
    global _told
    _told = False
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, _hand_on)


def listen() -> None:
    """Obey SIGNALS from now on: this process ends with EXIT_CODE, within `heeding` when it has saved."""
    global _told
    _told = False
    for number in SIGNALS:
        signal.signal(number, _obey)
    heard, hears = os.pipe()
    os.set_blocking(hears, False)
    signal.set_wakeup_fd(hears, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=[heard], name="megarl-signals", daemon=True).start()


@contextmanager
def heeding() -> Iterator[None]:
    """Within the block signals are noted, for `told` to say after each step. `Stopped` that leaves it ends the job."""
    global _heeding
    _heeding = True
    try:
        yield
    except Stopped:
        for number in SIGNALS:  # the end is agreed on; a launcher sends more when the first rank has ended
            signal.signal(number, signal.SIG_IGN)
        raise
    finally:
        _heeding = False


def told() -> bool:
    """Whether any rank was told to end, the same on all. Collective where there are ranks."""
    if not dist.is_initialized():
        return _told
    any_told = torch.tensor(int(_told))
    dist.all_reduce(any_told, op=dist.ReduceOp.MAX, group=host_group())
    return bool(any_told.item())


def _hand_on(number: int, frame: FrameType | None) -> None:
    global _told
    ranks = [pid for pid in children() if os.getpgid(pid) == pid]  # they lead groups of their own
    if not ranks:
        end_at_once(number, frame)
    if number == signal.SIGINT and _told:  # a terminal tells this process alone, once for each Ctrl-C
        say("SIGINT again: the job ends now, without this step; the same command goes on from the last checkpoint")
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        os._exit(128 + number)
    _told = _told or number == signal.SIGINT
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _obey(number: int, frame: FrameType | None) -> None:
    global _told
    if not _heeding:
        _end(number)
    _told = True


def _end(number: int) -> None:
    """End this process at once; two threads may come here."""
    if _ending.acquire(blocking=False):
        end_at_once(number, None)
    time.sleep(ECHO_S)  # the other thread is about to end the process


def _listen(heard: int) -> None:
    """Say that this process heeds a wish; end it outside of its steps, and at a second wish.

    A thread does: the main one may be in a collective, and come out late or never.
    """
    first: float | None = None
    has_said = False
    while number := os.read(heard, 1):
        if number[0] not in SIGNALS:
            continue
        if not (_heeding or _told):
            _end(number[0])
        if not has_said and local_rank() == "0":
            at_once = "" if number[0] == signal.SIGUSR1 else "; a second one ends the job at once"
            say(f"{signal.Signals(number[0]).name}: the job ends when this step is saved{at_once}")
            has_said = True
        if number[0] in _AT_ONCE:
            now = time.monotonic()
            if first is not None and now - first > ECHO_S:
                os._exit(128 + number[0])
            first = first or now
