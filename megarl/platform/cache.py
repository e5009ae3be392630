"""Copies of remote directories on this machine, made once, and made again only if the remote has changed.

    CACHE/NAME-DIGEST/        a copy; DIGEST is of the URI without secrets and of the size and mark of every file
    CACHE/NAME-DIGEST/.copied.json   size and time of every file when the copy was complete
    CACHE/.NAME-DIGEST.part/  an incomplete copy; a process that resumes it keeps its complete files
    CACHE/.NAME-DIGEST.lock   held (flock) by the process that makes the copy

A remote directory that changes gets another name, so no running job loses its files. Only damaged copies are deleted
automatically; delete others by hand when they are no longer needed.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from uuid import uuid4

from megarl.platform.errors import UserError
from megarl.platform.files import explained, file_error, sync_directory, write_whole
from megarl.platform.remote import Described, RemoteDirectory, ReportProgress
from megarl.platform.uri import WAITS_S, out_of_reach, persist

VARIABLE = "MEGARL_CACHE"  # D136
RECORD = ".copied.json"
NUM_STREAMS = 4
"""Files that are copied at the same time."""
SETTLED_S = 2
"""The times of copied files are set back by this many seconds, so that a later write to a file changes its time."""
ROUND_S = 0.2
MD5 = re.compile(r'"?([0-9a-f]{32})"?')


def cache_directory() -> Path:
    """Return `$MEGARL_CACHE`, or else `megarl` in `$XDG_CACHE_HOME` or `~/.cache`."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megarl"


def copy_of(remote: RemoteDirectory, names: Sequence[str], report: ReportProgress) -> Path:
    """Return the directory with copies of files of `remote`; copy the files that are missing or damaged.

    Args:
        remote: the directory to copy from.
        names: of the files, relative to `remote`.
        report: is given the bytes that arrive, also those that another process copies while this one waits for it.

    Raises:
        UserError: a file is missing, arrives incomplete, or does not fit on the disk; or the store fails.
        WriteError: the cache cannot be written.
    """
    root = cache_directory()
    files = remote.describe(names)
    final = root / _name(remote, files)
    if _intact(final, files):
        return final
    with explained(f"{VARIABLE}={root}"):
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root, final.name, report) as part:
            if not _intact(final, files):
                _copy(remote, files, final, part, report)
    return final


def _name(remote: RemoteDirectory, files: Sequence[Described]) -> str:
    last = re.sub(r"[^\w.-]", "_", str(remote).partition("::")[0].rpartition("/")[2])[:64].lstrip(".")
    described = json.dumps([str(remote), *map(astuple, sorted(files, key=lambda file: file.name))])
    return f"{last or 'directory'}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"


def _intact(directory: Path, files: Sequence[Described]) -> bool:
    return not _lacking(directory, files)


def _lacking(directory: Path, files: Sequence[Described]) -> list[Described]:
    """Return the files that a copy lacks, or that changed after they arrived."""
    record = _recorded(directory)

    def is_intact(file: Described) -> bool:
        try:
            now = (directory / file.name).stat()
        except OSError:
            return False
        return record.get(file.name) == [now.st_size, int(now.st_mtime)] and now.st_size == file.size

    return [file for file in files if not is_intact(file)]


def _recorded(directory: Path) -> dict[str, list[int]]:
    """Return size and time of the files that have arrived completely, by name."""
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


@contextmanager
def _locked(root: Path, name: str, report: ReportProgress) -> Iterator[Path]:
    """Yield the directory to copy to, locked for this process; wait while another process holds the lock."""
    part = root / f".{name}.part"
    held = 0
    with (root / f".{name}.lock").open("a", encoding="utf-8") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                size = _bytes_in(part)
                report(max(0, size - held))
                held = size
                time.sleep(ROUND_S)
            except OSError:  # a file system without locks: copy to a separate directory; the first complete copy wins
                part = root / f".{name}.{uuid4().hex}.part"
                break
        yield part


def _bytes_in(directory: Path) -> int:
    try:
        return sum(path.stat().st_size for path in directory.rglob("*"))
    except OSError:  # a file was just removed
        return 0


def _copy(remote: RemoteDirectory, files: Sequence[Described], final: Path, part: Path, report: ReportProgress) -> None:
    """Complete the copy in `part`, or the damaged copy in `final`, and give it its final name."""
    if final.exists():
        shutil.rmtree(part, ignore_errors=True)
        final.rename(part)
    part.mkdir(exist_ok=True)
    lacking = _lacking(part, files)
    if lacking:
        _check_room(remote, part, sum(file.size for file in lacking))
        _copy_files(remote, lacking, part, report)
    for directory in {(part / file.name).parent for file in files}:
        sync_directory(directory)
    try:
        part.rename(final)
    except OSError:
        if not _intact(final, files):
            raise
        shutil.rmtree(part)  # another process was faster
    sync_directory(final.parent)


def _check_room(remote: RemoteDirectory, part: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(part).free
    if num_bytes > free:
        raise UserError(
            f"{remote} needs {num_bytes:,} more bytes in {part.parent}, which has {free:,} free: free space there, or "
            f"let {VARIABLE} name a directory on another disk"
        )


def _copy_files(remote: RemoteDirectory, files: Sequence[Described], part: Path, report: ReportProgress) -> None:
    """Copy files, first the smallest and then several at a time, and note each complete file.

    A plain ETag is the MD5 of a file unless the store encrypts with its own keys. The smallest file shows which.
    """
    record = _recorded(part)
    smallest, *others = sorted(files, key=lambda file: file.size)
    has_sums = _copy_file(remote, smallest, part, report, md5=None) == _sum_of(smallest)
    _note(smallest, part, record)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        copies = {}
        for file in others:
            md5 = _sum_of(file) if has_sums else None
            copies[pool.submit(_copy_file, remote, file, part, report, md5=md5)] = file
        try:
            for copy in as_completed(copies):
                copy.result()
                _note(copies[copy], part, record)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _note(file: Described, part: Path, record: dict[str, list[int]]) -> None:
    """Add a complete file to the record."""
    written = int(time.time()) - SETTLED_S
    os.utime(part / file.name, (written, written))
    record[file.name] = [file.size, written]
    write_whole(part / RECORD, json.dumps(record).encode())


def _sum_of(file: Described) -> str | None:
    """Return the mark of a file if it may be an MD5."""
    found = MD5.fullmatch(file.mark)
    return found[1] if found else None


def _copy_file(remote: RemoteDirectory, file: Described, part: Path, report: ReportProgress, *, md5: str | None) -> str:
    """Copy one file, with retries, and return its MD5. Raise UserError if it does not arrive intact."""
    path = part / file.name
    path.parent.mkdir(parents=True, exist_ok=True)

    def copy() -> str:
        found = remote.download(file.name, path, report)
        size = path.stat().st_size
        if size != file.size:
            raise OSError(f"{file.name} arrived with {size} bytes instead of {file.size}")
        if md5 and md5 != found:
            raise OSError(f"{file.name} arrived with the MD5 {found} instead of {md5}")
        return found

    try:
        return persist(copy, WAITS_S)
    except Exception as error:  # each file system has errors of its own
        if file_error(error):  # of the local disk
            raise
        raise out_of_reach(str(remote), error) from error
