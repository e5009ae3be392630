"""What a directory must hold to be whole: the size and checksum of every file in it, written last.

The files are spread over the ranks, which all see the directory. A checksum finds what disks and people damage; it is
no signature.
"""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megarl.distributed.exchange import together

NAME = "manifest.json"
CHUNK_BYTES = 1 << 22

T = TypeVar("T")


def write_manifest(directory: Path) -> None:
    """Bring every file of `directory` to the disk, and then the manifest that names them. Collective."""
    found = _on_every_file(_files(directory), lambda name: _seal(directory / name))
    together(lambda: write_whole(directory / NAME, json.dumps(found, indent=1)) if dist.get_rank() == 0 else None)


def find_damage(directory: Path) -> str | None:
    """Which file of `directory` is not what its manifest says, and how; None where all are. Collective."""
    manifest = directory / NAME
    if not manifest.is_file():
        return f"{manifest} is missing"
    try:
        expected: dict[str, list[int]] = json.loads(manifest.read_text())
    except ValueError as error:
        return f"{manifest} is damaged: {error}"
    faults = _on_every_file(list(expected), lambda name: _compare(directory / name, *expected[name]))
    return next((fault for fault in faults.values() if fault), None)


def write_whole(path: Path, text: str) -> None:
    """Replace a small file in one step: a reader sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Bring to the disk which names `directory` holds: a rename is not there after a power cut otherwise."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(directory: Path) -> list[str]:
    names = together(
        lambda: sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    )
    return [name for name in names[0] if name != NAME]


def _on_every_file(names: list[str], look: Callable[[str], T]) -> dict[str, T]:
    """What `look` says of each file, in the order of `names`; each rank looks at its share."""
    share = names[dist.get_rank() :: dist.get_world_size()]
    parts = together(lambda: {name: look(name) for name in share})
    said = {name: answer for part in parts for name, answer in part.items()}
    return {name: said[name] for name in names}


def _seal(path: Path) -> list[int]:
    """The size and checksum of a file that is on the disk afterwards."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    sync_directory(path.parent)
    return [path.stat().st_size, _checksum(path)]


def _compare(path: Path, size: int, checksum: int) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    if (found := path.stat().st_size) != size:
        return f"{path} has {found} bytes instead of {size}"
    return None if _checksum(path) == checksum else f"{path} has another content than when it was written"


def _checksum(path: Path) -> int:
    """CRC-32 of the content."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
