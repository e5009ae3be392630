"""The tokens of all prompts of a data set: encoded once, by the ranks of a host together, and mapped into memory.

    CACHE/prompts/DIGEST/0.arrow   the prompts that the first rank of the host encoded: row, tokens, text
                        /0.json    what it counted among these rows, the number of files, and the checksum of its own

The directory stays until someone deletes it, and the next run on the same files finds it. It is made under another name
and published complete. If its files are damaged, they are made anew.
"""

import json
import logging
import os
import shutil
import socket
import tempfile
import time
import zlib
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch.distributed as dist
from numpy.typing import NDArray

from megarl.batch import int32
from megarl.data.census import Census, Counts
from megarl.data.row_checks import RowFaults, check_each, raise_faults
from megarl.data.rows import Rows
from megarl.data.table import DataRow
from megarl.distributed.exchange import on_each_rank, on_first_rank, run_of, together
from megarl.platform.cache import VARIABLE, cache_directory
from megarl.platform.files import explained

logger = logging.getLogger(__name__)

SCHEMA = pa.schema([("row", pa.int64()), ("token_ids", pa.list_(pa.int32())), ("text", pa.string())])
ABANDONED_S = 7 * 24 * 3600
"""The age of a directory that no living job completes."""
ROWS_AT_ONCE = 4096
"""Rows that are held as Python objects before they are written."""


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the model reads it."""

    token_ids: list[int]
    text: str  # of the tokens


Encode = Callable[[DataRow], EncodedPrompt | None]
"""Reads the prompt of a row; None if the row is left out."""


class EncodedPrompts:
    """The prompts that are kept, in the order of their rows; on disk until they are read."""

    def __init__(self, directory: Path) -> None:
        """Map the files of a directory."""
        seals = _Seal.all_of(directory)
        maps = [pa.memory_map(str(directory / f"{number}.arrow")) for number in range(len(seals))]
        table = pa.concat_tables([pa.ipc.open_file(each).read_all() for each in maps])
        self.rows: NDArray[np.int64] = table["row"].to_numpy()
        self._token_ids = table["token_ids"]
        self._texts = table["text"]
        self.counts = reduce(Counts.__add__, (Counts(**seal.counts) for seal in seals))

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each prompt."""
        lengths: NDArray[np.int64] = pc.list_value_length(self._token_ids).to_numpy().astype(np.int64)
        return lengths

    def token_ids(self, index: int) -> "array[int]":
        """Return the tokens of a prompt."""
        tokens = int32()
        tokens.frombytes(self._token_ids[index].values.to_numpy().tobytes())
        return tokens

    def text(self, index: int) -> str:
        """Return the text that the model sees."""
        text: str = self._texts[index].as_py()
        return text


@dataclass(frozen=True, kw_only=True)
class _Seal:
    """The facts about one file of prompts."""

    counts: dict[str, Any]  # of the census
    num_files: int  # of the directory
    checksum: int  # CRC-32 of the file and of the other fields

    @classmethod
    def of(cls, file: Path, *, counts: dict[str, Any], num_files: int) -> "_Seal":
        """Return the seal of a file."""
        words = json.dumps([counts, num_files], sort_keys=True).encode()
        with pa.memory_map(str(file)) as content:
            return cls(
                counts=counts, num_files=num_files, checksum=zlib.crc32(words, zlib.crc32(content.read_buffer()))
            )

    @classmethod
    def all_of(cls, directory: Path) -> list["_Seal"]:
        """Return those of all files of a directory, in order. Raises OSError, ValueError or TypeError."""
        first = cls(**json.loads((directory / "0.json").read_bytes()))
        others = (directory / f"{number}.json" for number in range(1, first.num_files))
        return [first, *(cls(**json.loads(path.read_bytes())) for path in others)]


def _is_intact(directory: Path) -> bool:
    """Return whether the files of a directory are those that were written."""
    try:
        seals = _Seal.all_of(directory)
        return all(
            seal == _Seal.of(directory / f"{number}.arrow", counts=seal.counts, num_files=seal.num_files)
            for number, seal in enumerate(seals)
        )
    except (OSError, ValueError, TypeError):
        return False


@dataclass(frozen=True)
class _Host:
    """This rank among the ranks of its host, and a name for what they make together."""

    rank: int
    num_ranks: int
    name: str  # another in each run
    first: int = 0  # the rank of the job that is the first of the host

    @classmethod
    def here(cls) -> "_Host":
        """Return this rank's host. Collective."""
        run = on_first_rank(lambda: uuid4().hex)
        if not dist.is_initialized():
            return cls(0, 1, run)
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        first = dist.get_rank() - rank
        return cls(rank, num_ranks, f"{run}-{socket.gethostname()}-{first}", first)


def encode_once(rows: Rows, encode: Encode, census: Census, *, digest: str | None) -> EncodedPrompts:
    """Return the encoded prompts of all rows; encode them if this host has not kept them. Collective.

    Args:
        rows: the rows of the data files.
        encode: returns the prompt of a row; None: the prompt is dropped. Raises UserError for an invalid row.
        census: counts the rows that this rank encodes.
        digest: names the files and all that decides on tokens; None: the tokens are not kept for another run.

    Raises:
        UserError: on every rank, if some rows are invalid; names the first of them.
        WriteError: the directory cannot be written.
    """
    host = _Host.here()
    directory = cache_directory() / "prompts"
    if host.rank == 0:
        _remove_abandoned(directory)
    kept = directory / digest if digest else None

    def find() -> bool:
        if host.rank or kept is None or _is_intact(kept):  # D428
            return kept is not None
        if kept.exists():
            logger.warning("the kept prompts in %s are damaged, and are encoded again", kept)
            shutil.rmtree(kept, ignore_errors=True)
        return False

    exists = together(find)[host.first]
    parent = directory if kept and _is_writable(directory) else Path(tempfile.gettempdir())
    part = parent / f".{host.name}.part"

    def encode_share() -> tuple[str, RowFaults]:
        return host.name, RowFaults() if exists else _write(part, rows, encode, census, host)

    def opened() -> EncodedPrompts:
        return EncodedPrompts(part if part.is_dir() or kept is None else kept)

    try:
        of_ranks = together(encode_share)
        for name in dict.fromkeys(name for name, _ in of_ranks):  # each host encodes all rows
            raise_faults(faults for of_host, faults in of_ranks if of_host == name)
        if kept and host.rank == 0 and not exists:
            with suppress(OSError):  # another job has published the same, or the cache is not writable
                part.rename(kept)
        together(lambda: None)  # it is published
        return on_each_rank(opened)
    finally:
        if host.rank == 0:
            shutil.rmtree(part, ignore_errors=True)  # what is mapped stays readable


def _remove_abandoned(directory: Path) -> None:
    """Remove what killed jobs have left unfinished."""
    for part in directory.glob(".*.part"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(part, ignore_errors=True)


def _is_writable(directory: Path) -> bool:
    """Return whether files can be made in a directory, which is made if it is missing."""
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    return os.access(directory, os.W_OK)


def _write(part: Path, rows: Rows, encode: Encode, census: Census, host: _Host) -> RowFaults:
    """Encode this rank's share of the rows into a file. Return the faults."""
    share = run_of(len(rows), rank=host.rank, size=host.num_ranks)
    faults = RowFaults()
    waiting = list[dict[str, object]]()
    with explained(f"{VARIABLE}={part.parent}"):
        part.mkdir(parents=True, exist_ok=True)
        path = part / f"{host.rank}.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
            for number, prompt in check_each(rows, share, encode, faults):
                if prompt is not None:
                    waiting.append({"row": number, "token_ids": prompt.token_ids, "text": prompt.text})
                if len(waiting) == ROWS_AT_ONCE:
                    _append(writer, waiting)
            _append(writer, waiting)
        seal = _Seal.of(path, counts=asdict(census.counts), num_files=host.num_ranks)
        (part / f"{host.rank}.json").write_text(json.dumps(asdict(seal)), encoding="utf-8")
    return faults


def _append(writer: pa.RecordBatchFileWriter, waiting: list[dict[str, object]]) -> None:
    writer.write_batch(pa.RecordBatch.from_pylist(waiting, schema=SCHEMA))
    waiting.clear()
