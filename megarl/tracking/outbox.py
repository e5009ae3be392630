"""A queue of records for a server, kept in a file until they are sent."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.tracking.lines import Lines

Record = dict[str, Any]


class Outbox:
    """A file of the records that are not sent yet, empty once all are; several threads may use it.

    `is_record` returns whether a JSON object is a record. Records of an earlier process come first. A record is removed
    after it was sent, so a crash may leave a record that was sent: the sender has to recognize it.
    """

    def __init__(self, path: Path, is_record: Callable[[Record], bool] = lambda record: True) -> None:
        self._lines = Lines(path, is_record)
        self._lines.cut(lambda record: True)
        self._sent = 0  # bytes at the beginning of the file whose records are sent
        self._changed = threading.Condition()

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._lines.path

    def cut(self, keep: Callable[[Mapping[str, Any]], bool]) -> None:
        """Drop every record unless `keep` returns True; it is called once per record, in order."""
        with self._changed:
            self._lines.cut(keep)

    def put(self, record: Record) -> None:
        """Add a record at the end."""
        with self._changed:
            self._lines.append([record])
            self._changed.notify_all()

    def first(self) -> Record | None:
        """Return the oldest record; None if there is none."""
        with self._changed:
            line = self._first_line() or next(iter(self._lines.waiting), None)
            return json.loads(line) if line else None

    def drop_first(self) -> None:
        """Remove the oldest record."""
        with self._changed:
            if line := self._first_line():
                self._sent += len(line)
                if not self._first_line():
                    with suppress(OSError):  # the file stays longer than necessary until the next attempt
                        self.path.write_bytes(b"")
                        self._sent = 0
            else:
                self._lines.waiting.popleft()

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for a record, or until `until()` is true, which is checked after each `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: until() or self._first_line() or self._lines.waiting)

    def wake(self) -> None:
        """Make waiting threads check their condition."""
        with self._changed:
            self._changed.notify_all()

    def records(self) -> Iterator[Record]:
        """Yield the records in the file, oldest first."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._sent)
            yield from map(json.loads, file)

    def close(self) -> int:
        """Write waiting records to the file, and return how many records are not sent."""
        with self._changed:
            self._lines.close()
            return len(self._lines.waiting) + sum(1 for _ in self.records())

    def _first_line(self) -> bytes:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._sent)
            return file.readline()
        return b""
