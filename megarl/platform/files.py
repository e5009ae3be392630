"""Atomic writes, safe file names, and errors of file systems with their remedies."""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import BinaryIO

from megarl.platform.errors import UserError

MOST_NEIGHBOURS = 1000
"""Names in a directory that may have been meant."""
REMEDIES = MappingProxyType(
    {
        errno.ENOSPC: "free space there, or name a directory on another disk",
        errno.EDQUOT: "remove files of yours there, have the quota raised, or name a directory on another disk",
        errno.EROFS: "have it mounted for writing, or name another directory",
        errno.EACCES: "let this user write there (chown, chmod), or name another directory",
        errno.EPERM: "let this user write there (chown, chmod, chattr), or name another directory",
        errno.EFBIG: "raise the largest size of a file (ulimit -f), or name a directory on another file system",
        errno.ENOTDIR: "a file is in the place of the directory: move it, or name another directory",
        errno.EEXIST: "a file is in the place of the directory: move it, or name another directory",
        errno.ENAMETOOLONG: "give a shorter name",
        errno.ELOOP: "its links lead in a circle: mend them, or name another directory",
        errno.EIO: "the disk or its connection fails: look at the kernel's log, or name a directory on another disk",
        errno.ESTALE: "the file server forgot it: mount it anew, or name another directory",
    }
)
"""The remedy for each error of a file system."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that becomes `path` once it is complete and on the disk, and never if writing fails."""
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
    """Write `data` to `path` atomically: afterwards the disk holds either `data` or the former content."""
    with replacing(path) as file:
        file.write(data)


def inside(directory: Path, name: str) -> Path:
    """Return `directory / name` for a name that was read from a file and may be anything.

    Raises:
        UserError: the text of the name leads out of the directory, or is no name. Links are followed: only the names
            are foreign, not the directories.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise UserError(f"{name!r} is no file below {directory}")
    return directory / path


def publish(part: Path, final: Path) -> None:
    """Give a complete file or directory its name, in place of one that has it already.

    Raises:
        OSError: the disk refuses; what had the name has it again.
    """
    old = final.with_name(f".{final.name}.old")
    discard(old)  # of a job that was killed here: no directory replaces another that has files
    with suppress(FileNotFoundError):
        final.rename(old)  # a directory that other programs read cannot be removed, but it can be renamed
    try:
        part.rename(final)
    except OSError:
        with suppress(OSError):
            old.rename(final)
        raise
    sync_directory(final.parent)
    discard(old)


def discard(path: Path) -> None:
    """Remove a file or a directory, as far as the disk allows."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Flush the names in `directory` to the disk, so that a rename survives a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(file: BinaryIO, num_bytes: int) -> None:
    """Reserve `num_bytes` for a file, so that writing them cannot fill the disk. Raise OSError if there is no room.

    If the file system cannot reserve space, nothing happens.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # D119, D121
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


def append_whole(path: Path, data: bytes) -> None:
    """Append `data` to a file, completely or, on an OSError, not at all."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab", buffering=0) as file:
            rest = memoryview(data)
            while rest:  # a disk that fills up first accepts a part
                rest = rest[file.write(rest) :]
    except OSError:
        if path.exists():
            os.truncate(path, size)
        raise


def check_writable(directory: Path, key: str) -> None:
    """Write a probe file to `directory` or, if it does not exist yet, to its nearest existing parent.

    Raises:
        WriteError: writing fails. The message has the remedy and `key`, the configuration key of the directory.
    """
    with explained(f"{key}={directory}"):
        existing = _nearest(directory)
        probe = existing / f".writable-{uuid.uuid4().hex}"
        try:
            probe.write_bytes(bytes(4096))
        except FileNotFoundError as error:  # as under /proc
            raise WriteError(f"{key}={directory} cannot be written: {existing} takes no files; name another") from error
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)


def _nearest(directory: Path) -> Path:
    """Return the directory or its nearest parent that exists, if only as a link. Raises OSError if none is found."""
    for path in (directory, *directory.parents):
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except ValueError as error:
            raise WriteError(f"{str(directory)!r} is no name of a directory: {error}; give another") from error
        return path
    raise WriteError(f"no directory above {directory} exists: change to another, or give an absolute path")


def similar(path: Path) -> str:
    """Return the question whether the most similar path that exists was meant instead of `path`; '' if none is."""
    missing = next((part for part in (*reversed(path.parents), path) if not part.exists()), None)
    if missing is None:
        return ""
    try:
        names = [found.name for found in islice(missing.parent.iterdir(), MOST_NEIGHBOURS)]
    except OSError:
        return ""
    for name in get_close_matches(missing.name, names):
        meant = missing.parent / name / path.relative_to(missing)
        if meant.exists():
            return f": did you mean {meant}?"
    return ""


class WriteError(UserError):
    """A failed write to a file system; the message has the subject, the cause and the remedy."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an error of a file system into a WriteError that names `what`."""
    try:
        yield
    except WriteError:
        raise
    except Exception as error:
        cause = file_error(error)
        if cause is None:
            raise
        raise WriteError(f"{what} cannot be written: {remedy(cause)}") from error


def file_error(error: BaseException) -> OSError | None:
    """Return the file system error that `error` is, has as its cause, or quotes by number, as libraries in Rust do."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in REMEDIES:
            return seen
        number = re.search(r"\(os error (\d+)\)", str(seen))
        if number and int(number[1]) in REMEDIES:
            return OSError(int(number[1]), os.strerror(int(number[1])))
        seen = seen.__cause__ or seen.__context__
    return None


def remedy(error: OSError) -> str:
    """Return the message of an error of a file system, with the remedy."""
    message = os.strerror(error.errno) if error.errno else str(error)
    place = f"{error.filename}: " if error.filename else ""
    advice = REMEDIES.get(error.errno or 0)
    return f"{place}{message}" + (f"; {advice}" if advice else "")
