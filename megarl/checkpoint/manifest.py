"""What a directory must hold to be whole: the size and checksum of every file in it, written last.

The files are spread over the ranks, which all see the directory. A checksum finds what disks and people damage; it is
no signature.
"""

import json
import os
import zlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.checkpoint.background import Task
from megarl.distributed.exchange import in_shares, share, together
from megarl.platform.files import inside, replacing, sync_directory

NAME = "manifest.json"
CHUNK_BYTES = 1 << 22


def sealing(directory: Path) -> Task:
    """Bring every file of `directory` to the disk, and then the manifest that names them."""
    names: list[str] = _on_first_rank(lambda: _files(directory))
    places = share(len(names))
    sealed = yield lambda: [_seal(directory / names[place]) for place in places]
    found = dict(zip(names, chain.from_iterable(sealed), strict=True))
    yield lambda: _finish(directory, found) if dist.get_rank() == 0 else None


def find_damage(directory: Path) -> str | None:
    """Which file of `directory` is not what its manifest says, and how; None where all are. Collective."""
    manifest = directory / NAME
    text: str | None = _on_first_rank(lambda: manifest.read_text() if manifest.is_file() else None)
    if text is None:
        return f"{manifest} is missing"
    try:
        seals = json.loads(text).items()
        expected = [(inside(directory, name), int(size), int(checksum)) for name, (size, checksum) in seals]
    except (ValueError, TypeError, AttributeError) as error:
        return f"{manifest} is damaged: {error}"

    def compare(places: range) -> list[str | None]:
        return [_compare(*file) for file in expected[places.start : places.stop]]

    faults = chain.from_iterable(in_shares(len(expected), compare))
    return next((fault for fault in faults if fault), None)


def _on_first_rank(compute: Callable[[], Any]) -> Any:
    """The answer of rank 0, on every rank."""
    return together(lambda: compute() if dist.get_rank() == 0 else None)[0]


def _files(directory: Path) -> list[str]:
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    return [name for name in names if name != NAME]


def _finish(directory: Path, found: dict[str, list[int]]) -> None:
    """Bring to the disk which names the directories hold, then write the manifest."""
    for parent in {(directory / name).parent for name in found}:
        sync_directory(parent)
    with replacing(directory / NAME) as file:
        file.write(json.dumps(found, indent=1).encode())


def _seal(path: Path) -> list[int]:
    """The size and checksum of a file that is on the disk afterwards."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
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
