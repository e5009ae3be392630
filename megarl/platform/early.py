"""Signals that reach a program while it is still being imported: it ends with a line, not with a traceback.

Every program that trains imports this module first; imports take seconds. `distributed.signals` takes over.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

EXIT_CODE = 75
"""Of a job that was told to end and can go on: EX_TEMPFAIL of sysexits.h, "invited to retry later"."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def say(line: str) -> None:
    """Write a line to standard error at once; also from a signal's handler, which may interrupt `print`."""
    with suppress(OSError):
        os.write(2, f"megarl: {line}\n".encode())


def local_rank() -> str:
    """Return this process's number on its host, as its launcher says; empty where nobody started it as a rank."""
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    return next((os.environ[name] for name in names if name in os.environ), "")


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """End this process with EXIT_CODE; the first one on its host says so."""
    if local_rank() in ("", "0"):
        say(
            f"{signal.Signals(number).name}: there is nothing to save now; the job ends, and the same command starts it"
        )
    os._exit(EXIT_CODE)


def _is_program() -> bool:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("megarl.")


if _is_program():
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of each name that it cannot look up backwards
    for _number in SIGNALS:
        signal.signal(_number, end_at_once)
