"""SIGTERM and SIGUSR1 are the wish that a job ends: it finishes its step, saves, and can be started again.

They come from Slurm before the end of an allocation, from whatever stops a container, from people. A rank that is told
only notes it; after each step the ranks ask one another, so that all end after the same one, whoever was told. Outside
of the steps there is nothing to save: there, and on a second SIGTERM, a rank ends at once.
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
from megarl.platform.processes import children

EXIT_CODE = 75
"""Of a job that was told to end and can go on: EX_TEMPFAIL of sysexits.h, "invited to retry later"."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ECHO_S = 5.0
"""A second SIGTERM within these seconds is the first one, come by another way: some senders tell every process."""


class Stopped(Exception):  # noqa: N818 - nothing is wrong
    """A rank was told to end; all do, after `step` finished steps, which are saved."""

    def __init__(self, step: int) -> None:
        super().__init__(f"told to end, step {step} is saved")
        self.step = step


_heeding = False
_told = False


def forward() -> None:
    """From now on this process, which watches ranks that it started, hands SIGNALS on to them. Linux only."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, _hand_on)


def listen() -> None:
    """From now on this process obeys SIGNALS: it ends with EXIT_CODE, within `heeding` when it has saved."""
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
    ranks = [pid for pid in children() if os.getpgid(pid) == pid]  # they lead groups of their own
    for pid in ranks:
        os.kill(pid, number)
    if not ranks:
        os._exit(EXIT_CODE)


def _obey(number: int, frame: FrameType | None) -> None:
    global _told
    if not _heeding:
        os._exit(EXIT_CODE)
    if not _told and os.environ.get("LOCAL_RANK") == "0":  # `print` may not be called from here: it may be at work
        with suppress(OSError):
            os.write(2, f"megarl: {signal.Signals(number).name}: the job ends when this step is saved\n".encode())
    _told = True


def _listen(heard: int) -> None:
    """End this process at a second SIGTERM. A thread does: the main one may be in a collective, and never come out."""
    first: float | None = None
    while number := os.read(heard, 1):
        if number[0] == signal.SIGTERM:
            now = time.monotonic()
            if first is not None and now - first > ECHO_S:
                os._exit(128 + signal.SIGTERM)
            first = first or now
