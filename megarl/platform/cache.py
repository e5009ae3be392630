"""Copies of remote directories on this machine, made once and whole, and made again only where the remote has changed.

    CACHE/NAME-DIGEST/        a copy; DIGEST is of the URI without secrets and of the size and mark of every file
    CACHE/NAME-DIGEST/.copied.json   size and time of every file, as they were when the copy was complete
    CACHE/.NAME-DIGEST.part/  a copy that is not complete; a process that goes on with it keeps its whole files
    CACHE/.NAME-DIGEST.lock   held (flock) by the process that makes the copy

A remote directory that changes gets another name, so no running job loses its files. Nothing is ever deleted here but
damaged copies; what is not needed any more may be removed by hand.
"""

import fcntl
import hashlib
import json
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from uuid import uuid4

from megarl.platform.files import explained, file_error, sync_directory, write_whole
from megarl.platform.remote import Described, RemoteDirectory
from megarl.platform.uri import WAITS_S, out_of_reach, persist

VARIABLE = "MEGARL_CACHE"
RECORD = ".copied.json"
NUM_STREAMS = 4
"""Files that are copied at a time."""
SETTLED_S = 2
"""So much older than the copy are its files made to look: whoever writes to one later leaves another time."""
ROUND_S = 0.2
MD5 = re.compile(r'"?([0-9a-f]{32})"?')

Count = Callable[[int], None]


def cache_directory() -> Path:
    """`$MEGARL_CACHE`, else `megarl` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get(VARIABLE):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megarl"


def copy_of(remote: RemoteDirectory, names: Sequence[str], count: Count) -> Path:
    """The directory with copies of files of `remote`; those that are not here, or damaged, are copied.

    Args:
        remote: where they are.
        names: of the files, relative to it.
        count: is told the bytes that arrive, also by the work of another process that is waited for.

    Raises:
        ValueError: a file is not there, does not arrive whole, or does not fit on the disk; on any error of the store.
        WriteError: the cache cannot be written.
    """
    root, files = cache_directory(), remote.describe(names)
    final = root / _name(remote, files)
    if _intact(final, files):
        return final
    with explained(f"{VARIABLE}={root}"):
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root, final.name, count) as part:
            if not _intact(final, files):
                _copy(remote, files, final, part, count)
    return final


def _name(remote: RemoteDirectory, files: Sequence[Described]) -> str:
    last = re.sub(r"[^\w.-]", "_", str(remote).partition("::")[0].rpartition("/")[2])[:64].lstrip(".")
    described = json.dumps([str(remote), *map(astuple, sorted(files, key=lambda file: file.name))])
    return f"{last or 'directory'}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"


def _intact(directory: Path, files: Sequence[Described]) -> bool:
    return not _lacking(directory, files)


def _lacking(directory: Path, files: Sequence[Described]) -> list[Described]:
    """The files that are not in a copy as they arrived."""
    record = _recorded(directory)

    def is_whole(file: Described) -> bool:
        try:
            now = (directory / file.name).stat()
        except OSError:
            return False
        return record.get(file.name) == [now.st_size, int(now.st_mtime)] and now.st_size == file.size

    return [file for file in files if not is_whole(file)]


def _recorded(directory: Path) -> dict[str, list[int]]:
    """Size and time of the files that had arrived whole, by name."""
    try:
        record = json.loads((directory / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


@contextmanager
def _alone(root: Path, name: str, count: Count) -> Iterator[Path]:
    """The directory to copy to, for this process alone until the block ends; waits for another that has it."""
    part, held = root / f".{name}.part", 0
    with (root / f".{name}.lock").open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                size = _bytes_in(part)
                count(max(0, size - held))
                held = size
                time.sleep(ROUND_S)
            except OSError:  # a file system without locks: a directory of its own, and the first to be done wins
                part = root / f".{name}.{uuid4().hex}.part"
                break
        yield part


def _bytes_in(directory: Path) -> int:
    try:
        return sum(path.stat().st_size for path in directory.rglob("*"))
    except OSError:  # a file has just gone
        return 0


def _copy(remote: RemoteDirectory, files: Sequence[Described], final: Path, part: Path, count: Count) -> None:
    """Complete what lies in `part`, or damaged in `final`, and give it its name."""
    if final.exists():
        shutil.rmtree(part, ignore_errors=True)
        final.rename(part)
    part.mkdir(exist_ok=True)
    if lacking := _lacking(part, files):
        _check_room(remote, part, sum(file.size for file in lacking))
        _copy_files(remote, lacking, part, count)
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
        raise ValueError(
            f"{remote} needs {num_bytes:,} more bytes in {part.parent}, where {free:,} are free: free space there, or "
            f"let {VARIABLE} name a directory on another disk"
        )


def _copy_files(remote: RemoteDirectory, files: Sequence[Described], part: Path, count: Count) -> None:
    """Copy files, the smallest first and then some at a time, and note each when it is whole.

    A plain ETag is the MD5 of a file unless the store encrypts with keys of its own: the smallest file tells which.
    """
    record = _Record(part)
    smallest, *others = sorted(files, key=lambda file: file.size)
    has_sums = _copy_file(remote, smallest, part, count, md5=None) == _sum_of(smallest)
    record.add(smallest)

    def copy(file: Described) -> None:
        _copy_file(remote, file, part, count, md5=_sum_of(file) if has_sums else None)
        record.add(file)

    _in_streams(copy, others)


def _sum_of(file: Described) -> str | None:
    """The MD5 that its mark may be."""
    found = MD5.fullmatch(file.mark)
    return found[1] if found else None


def _copy_file(remote: RemoteDirectory, file: Described, part: Path, count: Count, *, md5: str | None) -> str:
    """Copy one file, with patience; its MD5. Raises ValueError where it does not arrive as it is there."""
    place = part / file.name
    place.parent.mkdir(parents=True, exist_ok=True)

    def copy() -> str:
        found = remote.download(file.name, place, count)
        if (size := place.stat().st_size) != file.size:
            raise OSError(f"{file.name} arrived with {size} bytes instead of {file.size}")
        if md5 and md5 != found:
            raise OSError(f"{file.name} arrived with the MD5 {found} instead of {md5}")
        return found

    try:
        return persist(copy, WAITS_S)
    except Exception as error:  # each file system has errors of its own
        if file_error(error):  # the disk here
            raise
        raise out_of_reach(str(remote), error) from error


class _Record:
    """What has arrived whole in a directory; used by several threads."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._lock = directory, threading.Lock()
        self._files = _recorded(directory)

    def add(self, file: Described) -> None:
        """Bring a file to the disk, and note it."""
        place, written = self._directory / file.name, int(time.time()) - SETTLED_S
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.utime(place, (written, written))
        with self._lock:
            self._files[file.name] = [file.size, written]
            write_whole(self._directory / RECORD, json.dumps(self._files).encode())


def _in_streams(work: Callable[[Described], None], files: Sequence[Described]) -> None:
    """Do the work for all files in threads that do not keep a process alive; raises the first error, then no more."""
    waiting: queue.SimpleQueue[Described] = queue.SimpleQueue()
    for file in files:
        waiting.put(file)
    failures: list[BaseException] = []

    def run() -> None:
        while not failures:
            try:
                work(waiting.get_nowait())
            except queue.Empty:
                return
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(NUM_STREAMS, len(files)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
