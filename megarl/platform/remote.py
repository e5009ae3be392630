"""A directory at a URI, looked at and read; what is told of it has no secrets.

`directory / name` is a file that can be read where a `pathlib.Path` can: `read_bytes`, `exists`, `name`, `parent`.
"""

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pyarrow.fs import FileInfo, FileSelector, FileType, FSSpecHandler

from megarl.platform.secrets import redact
from megarl.platform.uri import open_filesystem, out_of_reach, why_unopened

CHUNK_BYTES = 1 << 23
NUM_QUESTIONS = 16
"""Asked of a store at a time."""
WITH_TAGS = ("abfs", "gcs", "s3")
"""The file systems of pyarrow's own whose files have an ETag."""
MARKS = ("ETag", "etag", "md5Hash", "checksum", "Last-Modified", "LastModified", "mtime", "updated", "created")
"""What fsspec's file systems call something that changes with a file, the best first."""


@dataclass(frozen=True)
class Described:
    """A file of a remote directory: what changes when the file changes."""

    name: str
    size: int  # bytes
    mark: str  # an ETag, or a time; empty where the file system has neither


@dataclass(frozen=True)
class RemoteFile:
    """A file that may be there."""

    parent: "RemoteDirectory"
    name: str

    def __str__(self) -> str:
        return f"{self.parent}/{self.name}"

    def exists(self) -> bool:
        """Whether the directory lists the file."""
        return self.name in self.parent.sizes

    is_file = exists

    def read_bytes(self) -> bytes:
        """The content of a small file. Raises FileNotFoundError, or ValueError where the file is out of reach."""
        return self.parent.read(self.name)


class RemoteDirectory:
    """The directory at a URI. What was listed or read once is remembered, and so is what failed.

    All methods raise ValueError, with the remedy, for what the file system says.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._read: dict[str, bytes | Exception] = {}

    def __str__(self) -> str:
        base, chain, rest = redact(self.uri).partition("::")
        return (base.partition("?")[0].rstrip("/") + chain + rest.partition("?")[0]).rstrip("/")

    def __truediv__(self, name: object) -> RemoteFile:
        return RemoteFile(self, str(name))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The files right in the directory, and their bytes."""
        listed = self._once("", self._list)
        assert isinstance(listed, dict)
        return listed

    def read(self, name: str) -> bytes:
        """The content of a small file; FileNotFoundError where there is none."""
        if name not in self.sizes:
            raise FileNotFoundError(f"{self} has no {name}")
        content = self._once(name, lambda: self._content(name))
        assert isinstance(content, bytes)
        return content

    def describe(self, names: Iterable[str]) -> list[Described]:
        """Sizes and marks of files. Raises ValueError for a file that is not there."""
        filesystem, root = self._place
        wanted = list(names)
        try:
            infos = filesystem.get_file_info([f"{root}/{name}" for name in wanted])
            for name, info in zip(wanted, infos, strict=True):
                if info.type != FileType.File or info.size is None:
                    raise FileNotFoundError(f"{name} is not there, or has no size")
            with ThreadPoolExecutor(NUM_QUESTIONS) as pool:
                marks = pool.map(self._mark, infos)
            return [Described(*each) for each in zip(wanted, (info.size for info in infos), marks, strict=True)]
        except Exception as error:  # each file system has errors of its own
            raise out_of_reach(str(self), error) from error

    def download(self, name: str, file: Path, count: Callable[[int], None]) -> str:
        """Copy a file here, tell `count` the bytes of each part, and return their MD5. Raises what anything raises."""
        filesystem, root = self._place
        digest = hashlib.md5(usedforsecurity=False)
        with filesystem.open_input_stream(f"{root}/{name}") as source, file.open("wb") as target:
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
                digest.update(chunk)
                count(len(chunk))
        return digest.hexdigest()

    @cached_property
    def _place(self) -> tuple[Any, str]:
        if why := why_unopened(self.uri):
            raise ValueError(f"{self} cannot be opened: {why}")
        filesystem, path = open_filesystem(self.uri)
        return filesystem, path.rstrip("/")

    def _once(self, key: str, work: Callable[[], Any]) -> Any:
        """The answer of `work`, or its error again, of an earlier call with the same key."""
        if key not in self._read:
            try:
                self._read[key] = work()
            except (ValueError, FileNotFoundError) as error:
                self._read[key] = error
            except Exception as error:  # each file system has errors of its own
                self._read[key] = out_of_reach(str(self), error)
        if isinstance(found := self._read[key], Exception):
            raise found
        return found

    def _list(self) -> dict[str, int]:
        filesystem, root = self._place
        try:
            found = filesystem.get_file_info(FileSelector(root))
        except FileNotFoundError:
            raise ValueError(f"no directory {self}: check the name, and that this machine may list it") from None
        return {info.base_name: info.size for info in found if info.type == FileType.File}

    def _content(self, name: str) -> bytes:
        filesystem, root = self._place
        with filesystem.open_input_stream(f"{root}/{name}") as file:
            content: bytes = file.read()
        return content

    def _mark(self, info: FileInfo) -> str:
        filesystem, _ = self._place
        handler = getattr(filesystem, "handler", None)
        if isinstance(handler, FSSpecHandler):
            told = handler.fs.info(info.path)
            return next((str(told[name]) for name in MARKS if told.get(name)), "")
        if filesystem.type_name in WITH_TAGS:
            with filesystem.open_input_file(info.path) as file:
                tags = {str(key): value for key, value in (file.metadata() or {}).items()}
            if tag := tags.get("ETag", b""):
                return tag.decode() if isinstance(tag, bytes) else str(tag)
        return str(info.mtime_ns or "")


@lru_cache(maxsize=64)
def remote_directory(uri: str) -> RemoteDirectory:
    """The directory at a URI, the same object for the same URI as long as the process lives."""
    return RemoteDirectory(uri)
