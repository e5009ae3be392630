"""Files that appear whole or not at all, names that lead nowhere else, and what to do where nothing can be written."""

import errno
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import BinaryIO

REMEDIES = MappingProxyType(
    {
        errno.ENOSPC: "free space there, or name a directory on another disk",
        errno.EDQUOT: "remove files of yours there, have the quota raised, or name a directory on another disk",
        errno.EROFS: "have it mounted for writing, or name another directory",
        errno.EACCES: "let this user write there (chown, chmod), or name another directory",
        errno.EPERM: "let this user write there (chown, chmod, chattr), or name another directory",
        errno.EFBIG: "raise the largest size of a file (ulimit -f), or name a directory on another file system",
        errno.ENOTDIR: "a file stands where a directory should be: move it, or name another directory",
        errno.EEXIST: "a file stands where a directory should be: move it, or name another directory",
        errno.EIO: "the disk or its connection fails: look at the kernel's log, or name a directory on another disk",
        errno.ESTALE: "the file server forgot it: mount it anew, or name another directory",
    }
)
"""What a user can do about an error of a file system."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that becomes `path` when it is complete and on the disk, and never if writing fails."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Have `path` hold `data`, which is on the disk afterwards, or what it held before."""
    with replacing(path) as file:
        file.write(data)


def inside(directory: Path, name: str) -> Path:
    """`directory / name`, of a name that stands in a file and may be anything.

    Raises:
        ValueError: the name, as it is written, leads out of the directory, or is none. Links are followed: it is the
            names that come from elsewhere, not the directories.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r} is no file below {directory}")
    return directory / path


def sync_directory(directory: Path) -> None:
    """Bring to the disk which names `directory` holds: a rename is not there after a power cut otherwise."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(file: BinaryIO, num_bytes: int) -> None:
    """Make room for a file of `num_bytes`, so that writing them cannot fail for want of it. Raises OSError.

    Where the file system cannot promise that, nothing happens.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


def append_whole(path: Path, data: bytes) -> None:
    """Add `data` to a file, all of it or, where there is an OSError, nothing."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab", buffering=0) as file:
            rest = memoryview(data)
            while rest:  # a disk that fills up takes a part first
                rest = rest[file.write(rest) :]
    except OSError:
        if path.exists():
            os.truncate(path, size)
        raise


def check_writable(directory: Path, key: str) -> None:
    """Write a file for a moment to `directory` or, where it is still to be made, to the one that will hold it.

    Raises:
        WriteError: that cannot be; names the configuration's `key`, which the directory comes from, and the remedy.
    """
    there = next(path for path in (directory, *directory.parents) if path.exists())
    with explained(f"{key}={directory}"):
        probe = there / f".writable-{uuid.uuid4().hex}"
        try:
            probe.write_bytes(bytes(4096))
        finally:
            probe.unlink(missing_ok=True)


class WriteError(ValueError):
    """A file system did not take something; says what, why, and what to do about it."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn the error of a file system into one that says that `what` cannot be written."""
    try:
        yield
    except WriteError:
        raise
    except Exception as error:
        if (cause := file_error(error)) is None:
            raise
        raise WriteError(f"{what} cannot be written: {remedy(cause)}") from error


def file_error(error: BaseException) -> OSError | None:
    """The error of a file system that `error` is, comes from, or as libraries in Rust have it, tells the number of."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in REMEDIES:
            return seen
        if (told := re.search(r"\(os error (\d+)\)", str(seen))) and int(told[1]) in REMEDIES:
            return OSError(int(told[1]), os.strerror(int(told[1])))
        seen = seen.__cause__ or seen.__context__
    return None


def remedy(error: OSError) -> str:
    """What an error of a file system says, and what to do about it."""
    said = os.strerror(error.errno) if error.errno else str(error)
    place = f"{error.filename}: " if error.filename else ""
    advice = REMEDIES.get(error.errno or 0)
    return f"{place}{said}" + (f"; {advice}" if advice else "")
