"""Files of JSON lines that grow during a run, and do not stop it if their disk is full or lost."""

import json
import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from megarl.platform.files import append_whole, remedy, replacing
from megarl.platform.small_files import open_file
from megarl.tracking.protocol import Row

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20


class Lines:
    """A file of complete lines, each of a step, in the order of `append`. Every other line counts as damaged.

    Lines that the disk does not accept wait in memory, up to `MAX_WAITING_BYTES`, and are tried again with the next
    lines. One warning marks the first failure, another the recovery. One thread appends, and others may read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: deque[bytes] = deque()
        self._num_bytes = 0  # that wait
        self._failing = False
        self._lost = 0
        self._lock = threading.Lock()  # so that no line is both in the file and waiting

    def append(self, rows: Iterable[Row]) -> None:
        """Add one line per row."""
        with self._lock:
            for row in rows:
                line = json.dumps(row, ensure_ascii=False, default=str).encode(errors="backslashreplace") + b"\n"
                if self._num_bytes + len(line) <= MAX_WAITING_BYTES:
                    self.waiting.append(line)
                    self._num_bytes += len(line)
                else:
                    self._lost += 1
            self._flush()

    def after(self, place: int) -> Iterator[tuple[Row, int]]:
        """Yield the rows after the first `place` bytes, those that wait too, each with the bytes up to its end.

        Raises what `read_lines` does.
        """
        with self._lock:
            size = self.path.stat().st_size if self.path.exists() else 0
            waiting = list(self.waiting)
        if place > size + sum(map(len, waiting)):
            place = 0  # somebody has cut the file
        rows = read_lines(self.path, start=place) if place < size else iter(())
        while place < size and (found := next(rows, None)):
            place += found[1]
            if found[0] and has_step(found[0]):
                yield found[0], place
        for line in waiting:
            size += len(line)
            row = _parse(line)
            if size > place and row:
                yield row, size

    def _flush(self) -> None:
        """Try to write the waiting lines."""
        if not self.waiting:
            return
        try:
            append_whole(self.path, b"".join(self.waiting))
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "%s accepts no more lines; they wait in memory and training continues: %s", self.path, remedy(error)
                )
            self._failing = True
            return
        if self._failing:
            logger.warning(
                "%s accepts lines again: %d waiting lines are written, %d are lost", self.path, *self._counts()
            )
        self.waiting.clear()
        self._num_bytes = 0
        self._failing = False
        self._lost = 0

    def close(self) -> None:
        """Try to write for the last time, and report the lines that are lost."""
        with self._lock:
            self._flush()
        if self.waiting:
            logger.error("%s lacks the last %d lines", self.path, sum(self._counts()))

    def cut(self, last_step: int | None) -> set[int]:
        """Remove the rows after `last_step`; None: all rows. Return the steps of all rows that there were.

        Damaged lines after the last kept row, as a crash leaves them, are removed. If damaged lines or removed rows
        precede a kept row, the old file is set aside, and the kept rows make a new file.
        """
        steps = set[int]()
        kept: list[range] = []  # ranges of bytes
        place = num_damaged = 0
        if not os.path.lexists(self.path):
            return steps
        try:
            if not os.path.isfile(self.path):  # noqa: PTH113 - raises nothing
                aside = _aside(self.path)
                self.path.rename(aside)
                logger.warning(
                    "%s is no regular file: it is set aside as %s, and a new file begins", self.path, aside.name
                )
                return steps
            for row, num_bytes in read_lines(self.path):
                if row is None or not has_step(row):
                    num_damaged += 1
                else:
                    steps.add(row["step"])
                    if last_step is not None and row["step"] <= last_step:
                        begin = kept.pop().start if kept and kept[-1].stop == place else place
                        kept.append(range(begin, place + num_bytes))
                place += num_bytes
            self._leave(kept, num_damaged)
        except OSError as error:
            logger.warning("%s keeps the lines of steps that will run again: %s", self.path, remedy(error))
        return steps

    def _leave(self, kept: list[range], num_damaged: int) -> None:
        """Keep only these ranges of bytes in the file. Raise OSError if the disk does not allow it."""
        if not kept or kept == [range(kept[0].stop)]:
            os.truncate(self.path, kept[0].stop if kept else 0)  # atomic, and possible on a full disk
            if num_damaged:
                logger.warning("%s had %d damaged lines at its end, which are removed", self.path, num_damaged)
            return
        with self.path.open("rb") as source:
            aside = _aside(self.path)
            with replacing(aside) as target:
                shutil.copyfileobj(source, target)
            with replacing(self.path) as target:
                for run in kept:
                    source.seek(run.start)
                    target.write(source.read(len(run)))
        logger.warning(
            "%s had %d damaged lines, or lines of later steps, before good lines: the good lines stay, and the old "
            "file is set aside as %s",
            *(self.path, num_damaged, aside.name),
        )

    def _counts(self) -> tuple[int, int]:
        return len(self.waiting), self._lost


def has_step(row: Row) -> bool:
    """Return whether a JSON object has a step."""
    return type(row.get("step")) is int  # a boolean is an integer too


def read_lines(path: Path, *, start: int = 0) -> Iterator[tuple[Row | None, int]]:
    """Yield the object of each line after the first `start` bytes of a file, and the number of bytes of the line.

    The object of a damaged line is None.

    Raises:
        OSError: the file cannot be read.
        Damage: it is no regular file.
    """
    with open_file(path) as file:  # text mode would also split lines at U+2028
        file.seek(start)
        while line := file.readline(MAX_WAITING_BYTES):
            yield _parse(line), len(line)


def _parse(line: bytes) -> Row | None:
    """Return the object of a line; None if it is damaged: a power cut leaves zeros, or half a line."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.set_aside-{datetime.now():%Y%m%d-%H%M%S-%f}")
