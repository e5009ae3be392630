"""A directory at any URI that pyarrow or fsspec opens, with the few operations that checkpoints need.

The file system only has to write complete files, list and delete: object stores have no rename. A file that exists may
be half written; a checkpoint is complete if it has its manifest, which is written last. An operation that fails is
tried again. Bytes travel as they are, whatever compression the name of a file seems to tell.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from pyarrow.fs import FileSelector, FileType

from megarl.checkpoint.directory import LATEST_FILE, MANIFEST_FILE, STEP_PREFIX, parse_step, step_of_name
from megarl.checkpoint.manifest import Seal
from megarl.platform.errors import UserError
from megarl.platform.secrets import redact
from megarl.platform.small_files import MAX_BYTES, Damage
from megarl.platform.uri import WAITS_S, open_filesystem, persist, split_options

P = ParamSpec("P")
T = TypeVar("T")

WITHOUT_DIRECTORIES = ("abfs", "gcs", "s3")
"""File systems that write files without directories, and may forbid to make one."""
CHUNK_BYTES = 1 << 23


def retried(operation: Callable[P, T]) -> Callable[P, T]:
    """Try an operation that fails again, as `persist` does after `WAITS_S`."""

    @wraps(operation)
    def retry(*args: P.args, **kwargs: P.kwargs) -> T:
        return persist(partial(operation, *args, **kwargs), WAITS_S)

    return retry


@dataclass(frozen=True)
class Remote:
    """The directory `name`, opened at its first use. All other names are relative to it.

    The last attempt's error of the file system is raised as it is.
    """

    name: str  # URI

    def __str__(self) -> str:
        return split_options(redact(self.name))[0].rstrip("/")  # a password may hold a question mark

    def checkpoint(self, step: int) -> "Remote":
        """Return the directory of a checkpoint in this directory."""
        base, options = split_options(self.name)
        return Remote(f"{base.rstrip('/')}/{STEP_PREFIX}{step}{options}")

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        filesystem, path = open_filesystem(self.name)
        return filesystem, path.rstrip("/")

    @retried
    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, None if it is missing. Raises Damage if it is not small."""
        filesystem, root = self._opened
        try:
            with filesystem.open_input_stream(f"{root}/{name}", compression=None) as file:
                content: bytes = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        if len(content) > MAX_BYTES:
            raise Damage.in_content(f"{self}/{name}", f"it has more than {MAX_BYTES} bytes")
        return content

    @retried
    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with self._open_to_write(name) as file:
            file.write(content)

    @retried
    def put(self, file: Path, name: str, seal: Seal, count: Callable[[int], None]) -> None:
        """Upload a file, reporting the bytes of each part to `count`.

        Raises:
            OSError: the file does not match `seal`, or its upload has another size.
        """
        size = 0
        checksum = 0
        with file.open("rb") as source, self._open_to_write(name) as target:
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
                count(len(chunk))
                size += len(chunk)
                checksum = zlib.crc32(chunk, checksum)
        if (size, checksum) != seal:
            raise OSError(f"{file} has another content than its manifest says")
        filesystem, root = self._opened
        uploaded = filesystem.get_file_info(f"{root}/{name}").size
        if uploaded != size:
            raise OSError(f"{self}/{name} has {uploaded} bytes instead of {size}")

    @retried
    def get(self, name: str, file: Path) -> None:
        """Download a file, and flush it to the disk."""
        filesystem, root = self._opened
        opened = filesystem.open_input_stream(f"{root}/{name}", compression=None)
        with opened as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
            target.flush()
            os.fsync(target.fileno())

    @retried
    def has(self, name: str) -> bool:
        """Return whether there is a file or directory of this name."""
        return self._exists(name)

    @retried
    def delete(self, name: str) -> None:
        """Delete a file if there is one."""
        self._delete(name)

    def latest(self) -> int | None:
        """Return the step of the directory's pointer; None if the pointer is missing or damaged."""
        return parse_step((self.read(LATEST_FILE) or b"").strip())

    def resumable_steps(self) -> list[int]:
        """Return the steps of complete checkpoints up to the pointer, in order.

        Raises:
            UserError: there is a pointer, but no complete checkpoint up to it.
        """
        last = self.latest()
        steps = self.complete_steps()
        found = [step for step in steps if last is None or step <= last]
        if last is not None and not found:
            raise UserError(
                f"{self}/{LATEST_FILE} names step {last}, but no complete {STEP_PREFIX}{last} or earlier exists"
            )
        return found

    @retried
    def complete_steps(self) -> list[int]:
        """Return the steps whose checkpoints have a manifest, in order."""
        filesystem, root = self._opened
        found = filesystem.get_file_info(FileSelector(root, allow_not_found=True))
        named = (step_of_name(info.base_name) for info in found)
        steps = sorted(step for step in named if step is not None)
        manifests = filesystem.get_file_info([f"{root}/{STEP_PREFIX}{step}/{MANIFEST_FILE}" for step in steps])
        return [step for step, info in zip(steps, manifests, strict=True) if info.type == FileType.File]

    @retried
    def remove(self, step: int) -> None:
        """Delete a checkpoint, its manifest first, so that it is never half deleted and taken for complete."""
        filesystem, root = self._opened
        self._delete(f"{STEP_PREFIX}{step}/{MANIFEST_FILE}")
        if self._exists(f"{STEP_PREFIX}{step}"):
            filesystem.delete_dir(f"{root}/{STEP_PREFIX}{step}")

    def _exists(self, name: str) -> bool:
        filesystem, root = self._opened
        return bool(filesystem.get_file_info(f"{root}/{name}").type != FileType.NotFound)

    def _delete(self, name: str) -> None:
        filesystem, root = self._opened
        if self._exists(name):
            filesystem.delete_file(f"{root}/{name}")

    def _open_to_write(self, name: str) -> Any:
        filesystem, root = self._opened
        path = f"{root}/{name}"
        if filesystem.type_name not in WITHOUT_DIRECTORIES:
            filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        return filesystem.open_output_stream(path, compression=None)


def share_of(files: Mapping[str, Seal], rank: int, world_size: int) -> list[tuple[str, Seal]]:
    """Return the files that one of `world_size` ranks transfers, the largest first.

    All ranks get about as many files and bytes.
    """
    return sorted(files.items(), key=lambda item: (-item[1][0], item[0]))[rank::world_size]
