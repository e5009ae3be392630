"""Data files by the name a user gave them: a local path, or a URI of anything that pyarrow or fsspec opens."""

from dataclasses import dataclass
from typing import Any

from megarl.platform.uri import open_filesystem, out_of_reach


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


def locate(name: str) -> Location:
    """Find the filesystem of a path or URI; nothing is read yet. Raises ValueError where there is none."""
    return Location(name, *open_filesystem(name))
