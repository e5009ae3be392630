"""Reading of small files that a run wrote: of bounded size, as a given type, with an error that names the file.

A disk, a person or a crash may have damaged a file. Reading never blocks, not even on a pipe in its place.
"""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from megarl.platform.errors import UserError

T = TypeVar("T")

MAX_BYTES = 64 << 20
"""The largest small file: the manifest of a checkpoint by 100,000 ranks has 20 MB."""

adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
"""Returns pydantic's checker of a type."""


class Damage(UserError):  # noqa: N818 - the state of a file
    """A file that differs from what the run wrote. The message begins with the file."""

    def __init__(self, file: object, cause: str) -> None:
        super().__init__(str(file), cause)

    def __str__(self) -> str:
        return " ".join(self.args)

    @classmethod
    def in_content(cls, file: object, cause: str) -> "Damage":
        """Return the damage of a file that can be read, but has impossible content."""
        return cls(file, f"is damaged: {cause}")


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading, without blocking on a pipe or a device in its place.

    Raises:
        Damage: it is no regular file.
        OSError: it is missing, or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damage(path, "is damaged: something else is in the place of the file")
    return os.fdopen(descriptor, "rb")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an error of the file system, or an impossible name, into Damage of `path`."""
    try:
        yield
    except Damage:
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise Damage(path, "is missing") from None
    except OSError as error:
        raise Damage(path, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise Damage.in_content(path, str(error)) from error


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file. Raise Damage if it cannot be read or has more than `max_bytes`."""
    with naming(path), open_file(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise Damage.in_content(path, f"it has more than {max_bytes} bytes")
    return content


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Return the UTF-8 text of a file. Raise Damage as `read_bytes`, or if the content is not UTF-8."""
    with naming(path):
        return read_bytes(path, max_bytes=max_bytes).decode()


def read_json(path: Path, shape: type[T]) -> T:
    """Return the content of a JSON file, as `shape`. Raise Damage as `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path), shape, file=path)


def parse_json(content: bytes, shape: type[T], *, file: object) -> T:
    """Return the content of JSON text, as `shape`: any type that pydantic can check, without conversions or extra keys.

    Raises:
        Damage: `file` has no JSON, deeper nesting or longer numbers than pydantic reads, or another type.
    """
    try:
        found: T = adapter(shape).validate_json(content, strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        cause = f"{place[:80]}: {first['msg']}" if place else first["msg"]
        raise Damage.in_content(file, cause) from None
    return found
