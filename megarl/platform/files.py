"""Files that appear whole or not at all, whenever the process or the machine dies, and names that lead nowhere else."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that becomes `path` when it is complete and on the disk, and never if writing fails."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def inside(directory: Path, name: str) -> Path:
    """`directory / name`, of a name that stands in a file and may be anything.

    Raises:
        ValueError: the name, as it is written, leads out of the directory, or is none. Links are followed: it is the
            names that come from elsewhere, not the directories.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r} is no file below {directory}")
    return directory / path


def sync_directory(directory: Path) -> None:
    """Bring to the disk which names `directory` holds: a rename is not there after a power cut otherwise."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
