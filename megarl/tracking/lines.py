"""Files of JSON lines that grow while a run goes on, and cost the run nothing where their disk is full or gone."""

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.platform.files import append_whole, remedy

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20


class Lines:
    """A file that has whole lines only, in the order of `append`.

    Lines that the disk does not take wait in memory, up to `MAX_WAITING_BYTES` of them, and are tried again with the
    next ones; it is reported once when that begins, and once when it is over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: deque[bytes] = deque()
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

    def cut(self, keep: Callable[[Mapping[str, Any]], bool]) -> None:
        """End the file, where there is one, before its first line that is not to be kept or is not whole."""
        size, is_spoilt = 0, False
        try:
            for row, num_bytes in whole_lines(self.path):
                if not keep(row):
                    break
                size += num_bytes
            else:
                is_spoilt = size < self.path.stat().st_size
            os.truncate(self.path, size)  # in one step, and on a full disk too
            if is_spoilt:
                logger.warning("%s had a line that a crash left spoilt, and ends before it now", self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("%s keeps the lines of steps that are run again: %s", self.path, remedy(error))

    def _counts(self) -> tuple[int, int]:
        return len(self.waiting), self._lost


def whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The objects of a file with the bytes of their lines, up to the first that a crash left short or spoilt."""
    with path.open("rb") as file:  # a text file would also be cut where a text has U+2028
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:  # a power cut leaves zeros, or the beginning of a line
                return
            if not line.endswith(b"\n"):
                return
            yield row, len(line)
