"""The first actions of a program: a signal or a deleted directory ends it without a traceback.

Imports take seconds, so every program that trains imports this module first. `distributed.signals` takes over later.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

EXIT_CODE = 75  # D109
"""The exit code of a job that a signal stopped and that can be resumed: EX_TEMPFAIL of sysexits.h."""
HANG_UP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
"""SIGHUP, which a closed terminal sends; nothing if this process was started to outlive it, as `nohup` does."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, *HANG_UP)


def write_warning(line: str) -> None:
    """Write a line to standard error as the log does, also in a signal handler, which may interrupt the log."""
    with suppress(OSError):
        os.write(2, f"{time.strftime('%H:%M:%S')} WARNING rank {os.environ.get('RANK', '0')}: {line}\n".encode())


def local_rank() -> str:
    """Return this process's rank on its host as its launcher set it; '' if no launcher started it."""
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    return next((os.environ[name] for name in names if name in os.environ), "")


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """End this process with EXIT_CODE; the first rank of the host prints why."""
    if local_rank() in ("", "0"):
        write_warning(
            f"{signal.Signals(number).name}: there is nothing to save now; the job ends, and the same command starts it"
        )
    os._exit(EXIT_CODE)


def install_signal_handlers() -> None:
    """End this process from now on when it gets one of SIGNALS."""
    for number in SIGNALS:
        signal.signal(number, end_at_once)


def check_working_directory() -> None:
    """End this program if its working directory was deleted, in which torch and the processes of rewards crash."""
    try:
        Path.cwd()
    except OSError as error:
        sys.exit(f"megarl: the working directory cannot be used ({error.strerror}): change to another directory")


def _is_program() -> bool:
    if Path(sys.argv[0]).name == "megarl":  # the installed script
        return True
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("megarl.")


if _is_program():
    check_working_directory()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of each address without a reverse DNS entry
    install_signal_handlers()
