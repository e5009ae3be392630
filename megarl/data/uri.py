"""Data files by the user's name: a local path, or a URI that pyarrow or fsspec opens."""

import zlib
from dataclasses import dataclass
from typing import Any

from megarl.platform.errors import UserError
from megarl.platform.uri import open_filesystem, out_of_reach

_TAIL_BYTES = 1 << 16
"""Bytes at the end of a file that are part of its fingerprint: parquet has its footer there."""


@dataclass(frozen=True)
class Location:
    """A file that can be opened repeatedly, for reading at any position."""

    name: str  # as the user wrote it
    filesystem: Any
    path: str

    def open(self) -> Any:
        """Open the file as a `pyarrow.NativeFile`. Raises UserError if it is missing or unreachable."""
        try:
            return self.filesystem.open_input_file(self.path)
        except FileNotFoundError as error:
            raise UserError(f"no such data file: {self.name}") from error
        except Exception as error:  # each filesystem has errors of its own
            raise out_of_reach(self.name, error) from error

    def pin(self, source: Any) -> "Pinned":
        """Return the file with the fingerprint that it has now; `source` is the open file."""
        return Pinned(self, _Fingerprint.of(self, source))


@dataclass(frozen=True)
class _Fingerprint:
    """Identifies the content of a file."""

    size: int  # bytes
    modified: int | None  # nanoseconds since 1970; None: unknown to the file system
    tail: int  # CRC-32 of the last bytes

    @classmethod
    def of(cls, location: Location, source: Any) -> "_Fingerprint":
        """Read the fingerprint of a file that is open as `source`."""
        try:
            size = source.size()
            modified = location.filesystem.get_file_info(location.path).mtime_ns
            source.seek(max(0, size - _TAIL_BYTES))
            return cls(size, modified, zlib.crc32(source.read()))
        except Exception as error:  # each filesystem has errors of its own
            raise out_of_reach(location.name, error) from error


@dataclass(frozen=True)
class Pinned:
    """A file that must not change: it is opened for each read, and may have been removed or changed in between."""

    location: Location
    fingerprint: _Fingerprint

    @property
    def name(self) -> str:
        """The name as the user wrote it."""
        return self.location.name

    def open(self) -> Any:
        """Open the file again.

        Raises:
            UserError: the file was removed or changed.
        """
        try:
            source = self.location.open()
        except UserError as error:
            raise UserError(f"{error}; the run reads it until its end: restore it, and resume") from error
        if _Fingerprint.of(self.location, source) != self.fingerprint:
            source.close()
            raise UserError(f"{self.name} has changed since this run opened it: restore it, or start the run again")
        return source


def locate(name: str) -> Location:
    """Find the filesystem of a path or URI, without reading. Raises UserError if there is none."""
    return Location(name, *open_filesystem(name))
