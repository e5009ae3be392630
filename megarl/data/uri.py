"""Data files by the user's name: a local path, or a URI that pyarrow or fsspec opens."""

import zlib
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
from pyarrow.fs import FileSystem, FSSpecHandler

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
    filesystem: FileSystem
    path: str

    def open(self) -> pa.NativeFile:
        """Open the file. Raises UserError if it is missing or unreachable."""
        try:
            return self.filesystem.open_input_file(self.path)
        except FileNotFoundError as error:
            raise UserError(f"no such data file: {self.name}{self._why_missing()}") from error
        except Exception as error:  # each filesystem has errors of its own
            raise out_of_reach(self.name, error) from error

    def _why_missing(self) -> str:
        """Return what fsspec reports about a missing file, which pyarrow hides.

        Raises:
            UserError: the file is not missing, but out of reach.
        """
        handler = getattr(self.filesystem, "handler", None)
        try:
            if isinstance(handler, FSSpecHandler):
                handler.fs.info(self.path)
        except FileNotFoundError as error:
            return str(error).partition(self.path)[2]
        except Exception as error:  # each filesystem has errors of its own
            raise out_of_reach(self.name, error) from error
        return ""

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
