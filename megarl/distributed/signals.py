"""SIGTERM and SIGUSR1 are the wish that a job ends: it finishes its step, saves, and can be started again.

They come from Slurm before the end of an allocation, from whatever stops a container, from people. A rank that is told
only notes it; after each step the ranks ask one another, so that all end after the same one, whoever was told. Outside
of the steps there is nothing to save: there, and on a second SIGTERM, a rank ends at once.
"""

import os
import signal
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
_terminated: float | None = None  # when the first SIGTERM came


def forward() -> None:
    """From now on this process, which watches ranks that it started, hands SIGNALS on to them. Linux only."""
    for number in SIGNALS:
        signal.signal(number, _hand_on)


def listen() -> None:
    """From now on this process obeys SIGNALS: it ends with EXIT_CODE, within `heeding` when it has saved."""
    global _told, _terminated
    _told, _terminated = False, None
    for number in SIGNALS:
        signal.signal(number, _obey)


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
    global _told, _terminated
    if not _heeding:
        os._exit(EXIT_CODE)
    now = time.monotonic()
    if number == signal.SIGTERM:
        if _terminated is not None and now - _terminated > ECHO_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        _terminated = _terminated or now
    if not _told and os.environ.get("LOCAL_RANK") == "0":  # `print` may not be called from here: it may be at work
        with suppress(OSError):
            os.write(2, f"megarl: {signal.Signals(number).name}: the job ends when this step is saved\n".encode())
    _told = True
