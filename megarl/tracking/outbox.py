"""Records on their way to a server: first in, first out, kept in a file until they are there."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.tracking.lines import Lines

Record = dict[str, Any]


class Outbox:
    """A file that holds what was not sent yet, and nothing once all is; several threads may use it.

    `is_record` says which JSON objects are records.

    What an earlier process left there comes first. A record leaves the file after it was sent, so one that was sent
    just before a crash is there again: who sends has to recognise it.
    """

    def __init__(self, path: Path, is_record: Callable[[Record], bool] = lambda record: True) -> None:
        self._lines = Lines(path, is_record)
        self._lines.cut(lambda record: True)
        self._sent = 0  # bytes at the beginning of the file
        self._changed = threading.Condition()

    @property
    def path(self) -> Path:
        """The file."""
        return self._lines.path

    def cut(self, keep: Callable[[Mapping[str, Any]], bool]) -> None:
        """Drop the records that are not to be kept; `keep` is asked once for each, in their order."""
        with self._changed:
            self._lines.cut(keep)

    def put(self, record: Record) -> None:
        """Add a record at the end."""
        with self._changed:
            self._lines.append([record])
            self._changed.notify_all()

    def first(self) -> Record | None:
        """The oldest record, None where none is left."""
        with self._changed:
            line = self._first_line() or next(iter(self._lines.waiting), None)
            return json.loads(line) if line else None

    def drop_first(self) -> None:
        """Forget the oldest record."""
        with self._changed:
            if line := self._first_line():
                self._sent += len(line)
                if not self._first_line():
                    with suppress(OSError):  # the file is longer than it need be, until the next time
                        self.path.write_bytes(b"")
                        self._sent = 0
            else:
                self._lines.waiting.popleft()

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for a record, or until `until()`, which is asked after each `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: until() or self._first_line() or self._lines.waiting)

    def wake(self) -> None:
        """Have those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def records(self) -> Iterator[Record]:
        """The records in the file, oldest first."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._sent)
            yield from map(json.loads, file)

    def close(self) -> int:
        """Have the file take what only memory has; returns how many records were not sent."""
        with self._changed:
            self._lines.close()
            return len(self._lines.waiting) + sum(1 for _ in self.records())

    def _first_line(self) -> bytes:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._sent)
            return file.readline()
        return b""
