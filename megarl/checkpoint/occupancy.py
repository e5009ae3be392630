"""One job in a run's directory at a time; what an earlier one was writing when it died is removed.

    RUN_DIR/.lock    host and process of the job that has the directory, locked (flock) as long as that process lives

The kernel, or the server of a network file system, drops the lock of a process that is gone. So a lock that can be had
proves that what lies unfinished beside it is nobody's. Where a file system cannot lock, nothing is removed.
"""

import fcntl
import logging
import os
import shutil
import socket
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from io import TextIOWrapper
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from megarl.checkpoint.directory import STEP_PREFIX
from megarl.distributed.exchange import on_first_rank, together
from megarl.platform.files import remedy

logger = logging.getLogger(__name__)

LOCK = ".lock"
PATIENCE_S = 60.0
"""How long a job that was killed may take to be gone: giving back the memory of a device takes seconds."""
VISIBLE_S = 10.0
"""How long a file may take to be seen on other hosts."""
_ROUND_S = 0.1


def occupy(directory: Path, *, patience_s: float = PATIENCE_S) -> AbstractContextManager[Any]:
    """Take `directory`, made if need be, for this job alone until the block ends, and tidy it up. Collective.

    Raises:
        ValueError: another job has it, named with its host and process; or some ranks see another directory of this
            name than rank 0, as on a disk of their host's own.
    """
    held: list[TextIOWrapper] = []

    def enter() -> None:
        if dist.get_rank() == 0 and (lock := _enter(directory, patience_s)):
            held.append(lock)

    together(enter)
    _require_shared(directory)
    return held[0] if held else nullcontext()


def _require_shared(directory: Path) -> None:
    probe = directory / on_first_rank(lambda: f".{uuid4().hex}.part")  # which `tidy_up` would remove
    on_first_rank(probe.touch)
    strangers = {
        rank: host
        for rank, (is_there, host) in enumerate(together(lambda: (_appears(probe), socket.gethostname())))
        if not is_there
    }
    on_first_rank(probe.unlink)
    if strangers:
        hosts = ", ".join(sorted(set(strangers.values())))
        raise ValueError(
            f"trainer.default_local_dir={directory} is not the same directory for rank 0 and for ranks "
            f"{', '.join(map(str, strangers))} ({hosts}): name one on a file system that all hosts share"
        )


def _appears(path: Path) -> bool:
    """Whether a new file is seen: at once, or when a network file system has noticed."""
    until = time.monotonic() + VISIBLE_S
    while not (is_there := path.exists()) and time.monotonic() < until:
        time.sleep(_ROUND_S)
    return is_there


def _enter(directory: Path, patience_s: float) -> TextIOWrapper | None:
    """The open file that holds the lock; None where there is no locking."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    lock = path.open("a+")
    try:
        is_ours = _lock(lock, patience_s)
    except OSError as error:
        logger.warning("%s cannot be locked (%s): nothing keeps another job out of its directory", path, error)
        lock.close()
        return None
    if not is_ours:
        lock.close()
        raise ValueError(
            f"trainer.default_local_dir={directory} is in use by another job: {_holder(path)}. End that one, or give "
            f"this one a directory of its own; where that host is gone for good and its lock stays, remove {path}"
        )
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    tidy_up(directory)
    return lock


def _holder(path: Path) -> str:
    return path.read_text() or "a process that has not said which"


def _lock(file: TextIOWrapper, patience_s: float) -> bool:
    """Whether the lock could be had within `patience_s` seconds. OSError where the file system has none."""
    until, has_said = time.monotonic() + patience_s, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            if not has_said:
                holder, place = _holder(Path(file.name)), Path(file.name).parent
                print(
                    f"megarl: {place} is taken: waiting up to {patience_s:g} s for {holder}",
                    file=sys.stderr,
                    flush=True,
                )
                has_said = True
            time.sleep(_ROUND_S)
        else:
            return True


def tidy_up(directory: Path) -> None:
    """Remove what a dead job had not finished, and give its name back to a checkpoint that it was about to replace."""
    for old in directory.glob(f".{STEP_PREFIX}*.old"):
        final = directory / old.stem.removeprefix(".")
        if final.exists():
            _remove(old)
        else:
            old.rename(final)
    for part in directory.glob(".*.part"):
        _remove(part)


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        logger.warning("%s, which a dead job left unfinished, is not removed: %s", path, remedy(error))
