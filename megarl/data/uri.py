"""Data files by the user's name: a local path, or a URI that pyarrow or fsspec opens."""

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.platform.errors import UserError
from megarl.platform.uri import open_filesystem, out_of_reach

_TAIL_BYTES = 1 << 16
"""Bytes at the end of a file that are part of its fingerprint: parquet has its footer there."""


class Fingerprint(NamedTuple):
    """Identifies the content of a file."""

    size: int  # bytes
    modified: int | None  # nanoseconds since 1970; None: unknown to the file system
    tail: int  # CRC-32 of the last bytes


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

    def fingerprint(self) -> Fingerprint:
        """Read the fingerprint of the file. Raises UserError if it is missing or unreachable."""
        with self.open() as source:
            try:
                size = source.size()
                modified = self.filesystem.get_file_info(self.path).mtime_ns
                source.seek(max(0, size - _TAIL_BYTES))
                return Fingerprint(size, modified, zlib.crc32(source.read()))
            except Exception as error:  # each filesystem has errors of its own
                raise out_of_reach(self.name, error) from error


def locate(name: str) -> Location:
    """Find the filesystem of a path or URI, without reading. Raises UserError if there is none."""
    return Location(name, *open_filesystem(name))
