"""Files of JSON lines that grow while a run goes on, and cost the run nothing where their disk is full or gone."""

import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from megarl.platform.files import append_whole, remedy, replacing
from megarl.platform.small_files import open_file

logger = logging.getLogger(__name__)

Row = dict[str, Any]

MAX_WAITING_BYTES = 64 << 20


class Lines:
    """A file that has whole lines only, in the order of `append`.

    Lines that the disk does not take wait in memory, up to `MAX_WAITING_BYTES` of them, and are tried again with the
    next ones; it is reported once when that begins, and once when it is over.

    Args:
        path: of the file.
        is_row: which JSON objects are lines of this file; every other line is damaged.
    """

    def __init__(self, path: Path, is_row: Callable[[Row], bool] = lambda row: True) -> None:
        self.path = path
        self.waiting: deque[bytes] = deque()
        self._is_row = is_row
        self._failing = False
        self._lost = 0

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add one line per row."""
        for row in rows:
            line = json.dumps(row, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"
            if sum(map(len, self.waiting)) + len(line) <= MAX_WAITING_BYTES:
                self.waiting.append(line)
            else:
                self._lost += 1
        self.flush()

    def flush(self) -> None:
        """Try to write what waits."""
        if not self.waiting:
            return
        try:
            append_whole(self.path, b"".join(self.waiting))
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "%s takes no more lines, they are kept in memory and training goes on: %s", self.path, remedy(error)
                )
            self._failing = True
            return
        if self._failing:
            logger.warning("%s is written again: %d lines of a while ago, %d lost", self.path, *self._counts())
        self.waiting.clear()
        self._failing, self._lost = False, 0

    def close(self) -> None:
        """Try for the last time, and say what is lost."""
        self.flush()
        if self.waiting:
            logger.error("%s lacks the last %d lines", self.path, sum(self._counts()))

    def cut(self, keep: Callable[[Row], bool]) -> None:
        """Leave in the file the rows that are to be kept; `keep` is asked once for each, in their order.

        Damaged lines behind the last row to keep, as a crash leaves them, go. If damaged lines, or rows that are not
        to be kept, stand before one, the file as it was is set aside, and the rows to keep make a new one.
        """
        kept: list[range] = []  # runs of bytes
        place = num_damaged = 0
        try:
            if os.path.lexists(self.path) and not os.path.isfile(self.path):  # noqa: PTH113 - raises nothing
                self.path.rename(aside := _aside(self.path))
                logger.warning("%s is no file: it is set aside as %s, and a new file begins", self.path, aside.name)
                return
            for row, num_bytes in read_lines(self.path, self._is_row):
                if row is None:
                    num_damaged += 1
                elif keep(row):
                    begin = kept.pop().start if kept and kept[-1].stop == place else place
                    kept.append(range(begin, place + num_bytes))
                place += num_bytes
            self._leave(kept, num_damaged)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("%s keeps the lines of steps that are run again: %s", self.path, remedy(error))

    def _leave(self, kept: list[range], num_damaged: int) -> None:
        """Leave these runs of bytes in the file. OSError where the disk does not allow it."""
        if not kept or kept == [range(kept[0].stop)]:
            os.truncate(self.path, kept[0].stop if kept else 0)  # in one step, and on a full disk too
            if num_damaged:
                logger.warning("%s had %d damaged lines at its end, which are left out", self.path, num_damaged)
            return
        with self.path.open("rb") as source:
            with replacing(aside := _aside(self.path)) as target:
                shutil.copyfileobj(source, target)
            with replacing(self.path) as target:
                for run in kept:
                    source.seek(run.start)
                    target.write(source.read(len(run)))
        logger.warning(
            "%s had %d damaged lines, or lines of later steps, before good ones: the good ones stay, and the whole "
            "file as it was is set aside as %s",
            *(self.path, num_damaged, aside.name),
        )

    def _counts(self) -> tuple[int, int]:
        return len(self.waiting), self._lost


def read_lines(path: Path, is_row: Callable[[Row], bool]) -> Iterator[tuple[Row | None, int]]:
    """Yield the object of each line of a file, None for a damaged one, with the bytes of the line.

    Raises:
        OSError: the file cannot be read.
        Damage: something else is in its place.
    """
    with open_file(path) as file:  # a text file would also be cut where a text has U+2028
        while line := file.readline(MAX_WAITING_BYTES):
            row = _parse(line)
            yield row if row is not None and is_row(row) else None, len(line)


def _parse(line: bytes) -> Row | None:
    """Return the object of a whole line; None if it is damaged: a power cut leaves zeros, or half a line."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.set_aside-{datetime.now():%Y%m%d-%H%M%S-%f}")
