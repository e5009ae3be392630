"""What a directory must hold to be whole: the size and checksum of every file in it, written last.

The files are spread over the ranks, which all see the directory. A checksum finds what disks and people damage; it is
no signature.
"""

import json
import os
import zlib
from itertools import chain
from pathlib import Path

import torch.distributed as dist

from megarl.checkpoint.background import Task
from megarl.distributed.exchange import in_shares, on_first_rank, share
from megarl.platform.files import inside, sync_directory, write_whole

NAME = "manifest.json"
Seal = tuple[int, int]
"""Size in bytes and CRC-32 of a file."""
CHUNK_BYTES = 1 << 22


def sealing(directory: Path) -> Task:
    """Bring every file of `directory` to the disk, and then the manifest that names them."""
    names = on_first_rank(lambda: _files(directory))
    places = share(len(names))
    sealed = yield lambda: [_seal(directory / names[place]) for place in places]
    found = dict(zip(names, chain.from_iterable(sealed), strict=True))
    yield lambda: _finish(directory, found) if dist.get_rank() == 0 else None


def find_damage(directory: Path) -> str | None:
    """Which file of `directory` is not what its manifest says, and how; None where all are. Collective."""
    manifest = directory / NAME
    text = on_first_rank(lambda: manifest.read_text() if manifest.is_file() else None)
    if text is None:
        return f"{manifest} is missing"
    try:
        expected = list(parse_manifest(text, directory).items())
    except ValueError as error:
        return f"{manifest} is damaged: {error}"

    def compare(places: range) -> list[str | None]:
        return [_compare(directory / name, *seal) for name, seal in expected[places.start : places.stop]]

    faults = chain.from_iterable(in_shares(len(expected), compare))
    return next((fault for fault in faults if fault), None)


def parse_manifest(text: str | bytes, directory: Path) -> dict[str, Seal]:
    """What the manifest of `directory` says of each file, by its path there.

    Raises:
        ValueError: it is no manifest, or a path leads out of the directory.
    """
    try:
        found = {name: (int(size), int(checksum)) for name, (size, checksum) in json.loads(text).items()}
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error
    for name in found:
        inside(directory, name)
    return found


def _files(directory: Path) -> list[str]:
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    return [name for name in names if name != NAME]


def _finish(directory: Path, found: dict[str, list[int]]) -> None:
    """Bring to the disk which names the directories hold, then write the manifest."""
    for parent in {(directory / name).parent for name in found}:
        sync_directory(parent)
    write_whole(directory / NAME, json.dumps(found, indent=1).encode())


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
