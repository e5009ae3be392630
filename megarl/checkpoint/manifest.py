"""The manifest of a checkpoint: size and checksum of every file in it, and of the manifest itself. It is written last.

All ranks see the directory, and share the work of reading its files. A checksum detects damage by disks and people; it
does not protect against forgery.
"""

import json
import os
import zlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Annotated, BinaryIO

import torch.distributed as dist
from pydantic import Field

from megarl.checkpoint.background import Task
from megarl.checkpoint.directory import MANIFEST_FILE, STATE_FILE
from megarl.distributed.exchange import in_shares, on_first_rank, share
from megarl.platform.files import inside, sync_directory, write_whole
from megarl.platform.small_files import Damage, naming, open_file, parse_json, read_bytes

Seal = tuple[Annotated[int, Field(ge=0, lt=1 << 63)], Annotated[int, Field(ge=0, lt=1 << 32)]]
"""Size in bytes and CRC-32 of a file. Of the manifest itself: number and CRC-32 of its other entries."""
CHUNK_BYTES = 1 << 22


def sealing(directory: Path) -> Task:
    """Flush every file of `directory` to the disk, then write the manifest that lists them."""
    names = on_first_rank(lambda: _files(directory))
    places = share(len(names))
    sealed = yield lambda: [_seal(directory / names[place]) for place in places]
    found = dict(zip(names, chain.from_iterable(sealed), strict=True))
    yield lambda: _finish(directory, found) if dist.get_rank() == 0 else None


def find_altered(directory: Path) -> str | None:
    """Describe the first file of `directory` that does not match its manifest; None if all match. Collective."""
    try:
        expected = list(on_first_rank(lambda: parse_manifest(read_bytes(directory / MANIFEST_FILE), directory)).items())
    except Damage as damage:
        return str(damage)

    def compare(places: range) -> list[str | None]:
        return [_compare(directory / name, *seal) for name, seal in expected[places.start : places.stop]]

    faults = chain.from_iterable(in_shares(len(expected), compare))
    return next((fault for fault in faults if fault), None)


def listed(directory: Path, pattern: str) -> list[Path]:
    """Return the files of a checkpoint whose names match, in order, without those that came from elsewhere later.

    Raises Damage.
    """
    names = parse_manifest(read_bytes(directory / MANIFEST_FILE), directory)
    return [directory / name for name in sorted(names) if fnmatchcase(name, pattern)]


def parse_manifest(content: bytes, directory: object) -> dict[str, Seal]:
    """Return the seals in a manifest of `directory`, local or remote, by the paths of the files in it.

    Raises:
        Damage: it is not a manifest, was altered, does not list the state, or has a path that leads out of the
            directory.
    """
    manifest = f"{directory}/{MANIFEST_FILE}"
    found = parse_json(content, dict[str, Seal], file=manifest)
    own = found.pop(MANIFEST_FILE, None)
    with naming(Path(manifest)):
        for name in found:
            inside(Path(str(directory)), name)
    if STATE_FILE not in found:
        raise Damage.in_content(manifest, f"it does not list {STATE_FILE}")
    if own != _own_seal(found):
        raise Damage.in_content(manifest, "its entries were altered")
    return found


def _files(directory: Path) -> list[str]:
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    return [name for name in names if name != MANIFEST_FILE]


def _own_seal(entries: Mapping[str, Seal]) -> Seal:
    """Return number and checksum of a manifest's entries."""
    return len(entries), zlib.crc32(json.dumps(entries).encode())


def _finish(directory: Path, found: dict[str, Seal]) -> None:
    """Flush the directories to the disk, then write the manifest."""
    for parent in {(directory / name).parent for name in found}:
        sync_directory(parent)
    write_whole(directory / MANIFEST_FILE, json.dumps(found | {MANIFEST_FILE: _own_seal(found)}, indent=1).encode())


def _seal(path: Path) -> Seal:
    """Flush a file to the disk; return its size and checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return path.stat().st_size, checksum(file)


def _compare(path: Path, size: int, expected: int) -> str | None:
    """Describe how a file differs from its seal; None if it matches."""
    try:
        with naming(path), open_file(path) as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                return f"{path} has {found} bytes instead of {size}"
            if checksum(file) != expected:
                return f"{path} has another content than when it was written"
    except Damage as damage:
        return str(damage)
    return None


def checksum(file: BinaryIO) -> int:
    """Return the CRC-32 of the rest of an open file."""
    value = 0
    while chunk := file.read(CHUNK_BYTES):
        value = zlib.crc32(chunk, value)
    return value
