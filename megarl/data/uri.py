"""Data files by the name a user gave them: a local path, or a URI of anything that pyarrow or fsspec opens."""

import zlib
from dataclasses import dataclass
from typing import Any

from megarl.platform.uri import open_filesystem, out_of_reach

_TAIL_BYTES = 1 << 16
"""Of the end of a file, where parquet describes its contents: these bytes are part of what a file is known by."""


@dataclass(frozen=True)
class Location:
    """A file that can be opened again and again, for reading at any place in it."""

    name: str  # as the user wrote it
    filesystem: Any
    path: str

    def open(self) -> Any:
        """The file, as a `pyarrow.NativeFile`; ValueError where it is missing or out of reach."""
        try:
            return self.filesystem.open_input_file(self.path)
        except FileNotFoundError as error:
            raise ValueError(f"no such data file: {self.name}") from error
        except Exception as error:  # each filesystem has errors of its own
            raise out_of_reach(self.name, error) from error

    def pin(self, source: Any) -> "Pinned":
        """Return the file as it is now; `source` is the open file."""
        return Pinned(self, _Fingerprint.of(self, source))


@dataclass(frozen=True)
class _Fingerprint:
    """What a file is known by."""

    size: int  # bytes
    modified: int | None  # nanoseconds since 1970; None: the file system does not say
    tail: int  # CRC-32 of the last bytes

    @classmethod
    def of(cls, location: Location, source: Any) -> "_Fingerprint":
        """Look at a file that is open as `source`."""
        try:
            size = source.size()
            modified = location.filesystem.get_file_info(location.path).mtime_ns
            source.seek(max(0, size - _TAIL_BYTES))
            return cls(size, modified, zlib.crc32(source.read()))
        except Exception as error:  # each filesystem has errors of its own
            raise out_of_reach(location.name, error) from error


@dataclass(frozen=True)
class Pinned:
    """A file that must stay what it was; it is opened anew for each read, and may have gone or changed meanwhile."""

    location: Location
    as_it_was: _Fingerprint

    @property
    def name(self) -> str:
        """As the user wrote it."""
        return self.location.name

    def open(self) -> Any:
        """Open the file again.

        Raises:
            ValueError: it has gone, or is not what it was.
        """
        try:
            source = self.location.open()
        except ValueError as error:
            raise ValueError(f"{error}; it is read as long as the run goes on: bring it back, and resume") from error
        if _Fingerprint.of(self.location, source) != self.as_it_was:
            source.close()
            raise ValueError(f"{self.name} has changed since this run opened it: put it back, or start the run again")
        return source


def locate(name: str) -> Location:
    """Find the filesystem of a path or URI; nothing is read yet. Raises ValueError where there is none."""
    return Location(name, *open_filesystem(name))
