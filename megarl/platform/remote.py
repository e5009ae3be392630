"""Directories at a URI: listing, reading, downloading. Their messages contain no secrets.

`directory / name` is a file with a part of the interface of `pathlib.Path`: `read_bytes`, `exists`, `name`, `parent`.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType, FSSpecHandler

from megarl.platform.errors import UserError
from megarl.platform.secrets import redact
from megarl.platform.uri import open_filesystem, out_of_reach, split_options, why_unopened

CHUNK_BYTES = 1 << 23
NUM_QUERIES = 16
"""Queries of a store at the same time."""
WITH_TAGS = ("abfs", "gcs", "s3")
"""The file systems of pyarrow that give files an ETag."""
TAGS = ("ETag", "etag", "md5Hash", "checksum", "blob_id")
MARKS = (*TAGS, "Last-Modified", "LastModified", "mtime", "updated", "created")
"""Attributes of files in file systems of fsspec that change with the content, the best first."""

ReportProgress = Callable[[int], None]
"""A function that is given how many more bytes, or other units, are done."""


@dataclass(frozen=True)
class Described:
    """A file of a remote directory, with attributes that change if the file changes."""

    name: str
    size: int  # bytes
    mark: str  # an ETag or a time; empty if the file system has neither


@dataclass(frozen=True)
class RemoteFile:
    """A file that may exist."""

    parent: "RemoteDirectory"
    name: str

    def __str__(self) -> str:
        return f"{self.parent}/{self.name}"

    def exists(self) -> bool:
        """Return whether the directory lists the file."""
        return self.name in self.parent.sizes

    is_file = exists

    def read_bytes(self) -> bytes:
        """Return the content of a small file. Raise FileNotFoundError, or UserError if the file cannot be reached."""
        return self.parent.read(self.name)


class RemoteDirectory:
    """The directory at a URI. Listings, small files and errors are cached.

    All methods raise UserError, with the remedy, for an error of the file system.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._read: dict[str, bytes | dict[str, int] | Exception] = {}

    def __str__(self) -> str:
        links = redact(self.uri).split("::")
        return "::".join(split_options(link)[0].rstrip("/") for link in links)

    def __truediv__(self, name: object) -> RemoteFile:
        return RemoteFile(self, str(name))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes in bytes of the files directly in the directory."""
        listed = self._once("")
        assert isinstance(listed, dict)
        return listed

    def read(self, name: str) -> bytes:
        """Return the content of a small file. Raise FileNotFoundError if it does not exist."""
        if name not in self.sizes:
            raise FileNotFoundError(f"{self} has no {name}")
        content = self._once(name)
        assert isinstance(content, bytes)
        return content

    def describe(self, names: Iterable[str]) -> list[Described]:
        """Return sizes and marks of files. Raise UserError for a file that does not exist."""
        filesystem, root = self._opened
        wanted = list(names)
        try:
            infos = filesystem.get_file_info([f"{root}/{name}" for name in wanted])
            for name, info in zip(wanted, infos, strict=True):
                if info.type != FileType.File or info.size is None:
                    raise FileNotFoundError(f"{name} does not exist, or has no size")
            with ThreadPoolExecutor(NUM_QUERIES) as pool:
                marks = pool.map(self._mark, infos)
            return [Described(name, info.size, mark) for name, info, mark in zip(wanted, infos, marks, strict=True)]
        except Exception as error:  # each file system has errors of its own
            raise out_of_reach(str(self), error) from error

    def download(self, name: str, file: Path, report: ReportProgress) -> str:
        """Copy a remote file to the disk, report the bytes of each part, and return the MD5. Raise all errors."""
        filesystem, root = self._opened
        digest = hashlib.md5(usedforsecurity=False)
        opened = filesystem.open_input_stream(f"{root}/{name}", compression=None)  # whatever its name ends with
        with opened as source, file.open("wb") as target:
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
                digest.update(chunk)
                report(len(chunk))
            target.flush()
            os.fsync(target.fileno())
        return digest.hexdigest()

    @cached_property
    def _opened(self) -> tuple[FileSystem, str]:
        why = why_unopened(self.uri)
        if why:
            raise UserError(f"{self} cannot be opened: {why}")
        filesystem, path = open_filesystem(self.uri)
        return filesystem, path.rstrip("/")

    def _once(self, name: str) -> bytes | dict[str, int]:
        """Return the content of a file, or for '' the listing, as the first call found it. Raise the error of that."""
        if name not in self._read:
            try:
                self._read[name] = self._content(name) if name else self._list()
            except (UserError, FileNotFoundError) as error:
                self._read[name] = error
            except Exception as error:  # each file system has errors of its own
                self._read[name] = out_of_reach(str(self), error)
        found = self._read[name]
        if isinstance(found, Exception):
            raise found
        return found

    def _list(self) -> dict[str, int]:
        filesystem, root = self._opened
        try:
            found = filesystem.get_file_info(FileSelector(root))
        except FileNotFoundError:
            raise UserError(f"no directory {self}: check the name, and that this machine may list it") from None
        return {info.base_name: info.size for info in found if info.type == FileType.File}

    def _content(self, name: str) -> bytes:
        filesystem, root = self._opened
        with filesystem.open_input_stream(f"{root}/{name}", compression=None) as file:
            content: bytes = file.read()
        return content

    def _mark(self, info: FileInfo) -> str:
        filesystem, _ = self._opened
        handler = getattr(filesystem, "handler", None)
        if isinstance(handler, FSSpecHandler):
            facts = handler.fs.info(info.path)
            return next((str(facts[name]) for name in MARKS if facts.get(name)), "")
        if filesystem.type_name in WITH_TAGS:
            with filesystem.open_input_file(info.path) as file:
                tags = {str(key): value for key, value in (file.metadata() or {}).items()}
            tag = tags.get("ETag", b"")
            if tag:
                return tag.decode() if isinstance(tag, bytes) else str(tag)
        return str(info.mtime_ns or "")


def split_uri(uri: str) -> tuple[str, str]:
    """Return the URI of the directory of a file, and the name of the file in it."""
    first, chain, rest = uri.partition("::")
    path, options = split_options(first)
    parent, _, name = path.rstrip("/").rpartition("/")
    return f"{parent}{options}{chain}{rest}", name


@lru_cache(maxsize=64)
def remote_directory(uri: str) -> RemoteDirectory:
    """Return the directory at a URI; the same object for the same URI while this process runs."""
    return RemoteDirectory(uri)
