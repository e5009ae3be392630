"""Locks a run's directory, so that one job uses it at a time, and removes the unfinished files of jobs that died.

    RUN_DIR/.lock    host and process of the job that has the directory, locked (flock) as long as that process lives

The kernel, or the server of a network file system, drops the lock of a process that has ended. So a job that gets the
lock knows that unfinished files in the directory belong to no running job. If a file system cannot lock, nothing is
removed.
"""

import fcntl
import logging
import os
import shutil
import socket
import time
from contextlib import AbstractContextManager, nullcontext
from io import TextIOWrapper
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from megarl.checkpoint.directory import LOCK, STEP_PREFIX
from megarl.distributed.exchange import on_each_rank, on_first_rank, together
from megarl.platform.errors import UserError
from megarl.platform.files import remedy

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long a job that was killed may take to end: giving back the memory of a device takes seconds."""
VISIBLE_S = 10.0
"""How long a file may take to appear on other hosts."""
_ROUND_S = 0.1


def occupy(directory: Path) -> AbstractContextManager[object]:
    """Lock `directory` for this job until the block ends, and tidy it up; make it if it is missing. Collective.

    Raises:
        UserError: another job has the directory, named with its host and process; or some ranks see another directory
            of this name than rank 0, as on a local disk of their host.
    """
    lock = on_each_rank(lambda: _enter(directory) if dist.get_rank() == 0 else None)
    _require_shared(directory)
    return lock or nullcontext()


def _require_shared(directory: Path) -> None:
    probe = directory / on_first_rank(lambda: f".{uuid4().hex}.part")  # which `tidy_up` would remove
    on_first_rank(probe.touch)
    seen = together(lambda: (_appears(probe), socket.gethostname()))
    strangers = {rank: host for rank, (is_there, host) in enumerate(seen) if not is_there}
    on_first_rank(probe.unlink)
    if strangers:
        hosts = ", ".join(sorted(set(strangers.values())))
        raise UserError(
            f"trainer.default_local_dir={directory} is not the same directory for rank 0 and for ranks "
            f"{', '.join(map(str, strangers))} ({hosts}): name a directory on a file system that all hosts share"
        )


def _appears(path: Path) -> bool:
    """Return whether a new file is visible, at once or after a network file system has noticed it."""
    until = time.monotonic() + VISIBLE_S
    while not path.exists():
        if time.monotonic() >= until:
            return False
        time.sleep(_ROUND_S)
    return True


def _enter(directory: Path) -> TextIOWrapper | None:
    """Return the open file that holds the lock; None if the file system cannot lock."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    lock = path.open("a+", encoding="utf-8")
    try:
        is_ours = _lock(lock)
    except OSError as error:
        logger.warning("%s cannot be locked (%s): another job could use its directory at the same time", path, error)
        lock.close()
        return None
    if not is_ours:
        lock.close()
        raise UserError(
            f"trainer.default_local_dir={directory} is in use by another job: {_holder(path)}. End that job, or give "
            f"this one its own directory; if that host is gone for good and its lock stays, remove {path}"
        )
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    tidy_up(directory)
    return lock


def _holder(path: Path) -> str:
    return path.read_text(encoding="utf-8") or "an unknown process"


def _lock(file: TextIOWrapper) -> bool:
    """Return whether the file was locked within `PATIENCE_S` seconds. OSError if the file system has no locks."""
    until = time.monotonic() + PATIENCE_S
    has_reported = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # D123
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            if not has_reported:
                holder = _holder(Path(file.name))
                place = Path(file.name).parent
                logger.warning("%s is in use: waiting up to %g s for %s", place, PATIENCE_S, holder)
                has_reported = True
            time.sleep(_ROUND_S)
        else:
            return True


def tidy_up(directory: Path) -> None:
    """Remove the unfinished files of dead jobs, and rename back a checkpoint that such a job was replacing."""
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
        logger.warning("%s, left unfinished by a job that died, cannot be removed: %s", path, remedy(error))
