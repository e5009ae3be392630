"""Tables in JSON files: a record on each line, or one list of records; perhaps compressed.

The position of each line is found once; a line is parsed when its row is read, so values keep their own types. Lists
and compressed files are unpacked once into a temporary file, which is removed with the process.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from shutil import copyfileobj
from tempfile import TemporaryFile
from typing import Any
from weakref import finalize

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megarl.data.table import DataRow, WantedColumns
from megarl.data.uri import Location, Pinned
from megarl.platform.errors import UserError

LINES = (".jsonl", ".ndjson")
LIST = ".json"
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
GROUP_BYTES = 4 << 20
"""Approximate size of the groups of lines that are read together."""
_BLOCK_BYTES = 4 << 20
_BEGINNING_BYTES = 4096  # the bracket of a list must be in here
_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True)
class _Spool:
    """A private copy of a file's records, removed together with this object."""

    file: Any

    def __post_init__(self) -> None:
        finalize(self, self.file.close)

    def open(self) -> Any:
        """Return the copy, for reading at any position; it stays open."""
        return nullcontext(self.file)


@dataclass(frozen=True, eq=False)
class JsonTable:
    """A JSON file whose records have been found."""

    name: str
    source: Pinned | _Spool
    columns: frozenset[str]
    required: tuple[str, ...]
    spans: NDArray[np.int64]  # [rows, 2]: first byte of each record, and the byte after it
    lines: NDArray[np.int64] | None  # of each record, counted from 1; None: the file is one list

    @classmethod
    def open(cls, location: Location, wanted: WantedColumns) -> "JsonTable":
        """Find the records of a file.

        Raises:
            UserError: the file is missing, is not JSON, has no record, or its first record lacks a column.
        """
        with location.open() as source:
            try:
                kept, spans, lines = _find_records(location, source)
            except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
                raise UserError(f"{location.name} cannot be read as JSON: {error}") from error
        if not len(spans):
            raise UserError(f"{location.name} is empty: it has no record")
        columns = frozenset((*wanted.required, *wanted.optional))
        table = cls(location.name, kept, columns, wanted.required, spans, lines)
        wanted.find(location.name, table._first_record())
        return table

    def groups(self) -> "Iterator[LineGroup]":
        """Yield groups of neighbouring records."""
        start = 0
        ends = self.spans[:, 1]
        while start < len(ends):
            stop = max(start + 1, int(np.searchsorted(ends, self.spans[start, 0] + GROUP_BYTES, side="right")))
            yield LineGroup(self, range(start, stop))
            start = stop

    def row_name(self, number: int) -> str:
        """Return the line of a row, counted from 1; in a list its number, counted from 0."""
        return f"row {number}" if self.lines is None else f"line {self.lines[number]}"

    def parse(self, text: bytes) -> DataRow:
        """Return the record in `text`.

        Raises:
            UserError: the record is not a JSON object, or has a field twice.
        """
        try:
            record = json.loads(text, object_pairs_hook=_unique)
        except UserError:
            raise
        except RecursionError as error:
            raise UserError("the record is nested too deeply") from error
        except ValueError as error:  # also a number of more digits than Python reads
            raise UserError(f"a record must be one line of JSON in UTF-8: {error}") from error
        if not isinstance(record, dict):
            raise UserError(f"a record must be a JSON object with named fields, not {text[:100]!r}")
        return record

    def _first_record(self) -> DataRow:
        (batch,) = LineGroup(self, range(1)).read(range(1))
        try:
            return self.parse(batch.to_pylist()[0]["record"])
        except UserError as error:
            raise UserError(f"{self.name}, {self.row_name(0)}: {error}") from error


@dataclass(frozen=True, eq=False)
class LineGroup:
    """Neighbouring records of a JSON file."""

    table: JsonTable
    rows: range  # of the table

    @property
    def num_rows(self) -> int:
        """Rows in the group, at least 1."""
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of the records in the file."""
        return int(self.table.spans[self.rows.stop - 1, 1] - self.table.spans[self.rows.start, 0])

    def parts(self, part_bytes: int) -> list[range]:
        """Return all rows as one part: groups are small."""
        del part_bytes
        return [range(self.num_rows)]

    def read(self, rows: range) -> Iterator[Any]:
        """Yield one batch with the text of each record."""
        spans = self.table.spans[self.rows.start + rows.start : self.rows.start + rows.stop]
        first = int(spans[0, 0])
        with self.table.source.open() as source:
            try:
                source.seek(first)
                text = source.read(int(spans[-1, 1]) - first)
            except Exception as error:  # each filesystem has errors of its own
                raise UserError(f"{self.table.name} cannot be read: {error}") from error
        records = [text[start:stop] for start, stop in (spans - first).tolist()]
        yield pa.RecordBatch.from_pydict({"record": pa.array(records, pa.large_binary())})

    def decode(self, record: DataRow) -> DataRow:
        """Return the wanted fields of a record; a required field that it lacks is None."""
        found = self.table.parse(record["record"])
        wanted = {name: value for name, value in found.items() if name in self.table.columns}
        return dict.fromkeys(self.table.required) | wanted


def holds_json(location: Location) -> bool:
    """Return whether the name of a file is that of a JSON file."""
    suffixes = [*reversed(PurePosixPath(location.path).suffixes), ""]
    return suffixes[suffixes[0] in CODECS] in (*LINES, LIST)


def _find_records(
    location: Location, source: Any
) -> tuple[Pinned | _Spool, NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the source of the records, their spans in it, and their lines in the file."""
    kept: Pinned | _Spool = location.pin(source)
    source.seek(0)
    codec = CODECS.get(PurePosixPath(location.path).suffix)
    if codec:
        kept = _Spool(TemporaryFile())  # noqa: SIM115 - the spool closes it
        copyfileobj(pa.CompressedInputStream(source, codec), kept.file, _BLOCK_BYTES)
        source = kept.file
        source.seek(0)
    beginning = source.read(_BEGINNING_BYTES).removeprefix(BOM_UTF8).lstrip()
    source.seek(0)
    if beginning.startswith(b"["):
        return _unpack_list(source.read().decode("utf-8-sig"))
    return kept, *_find_lines(source)


def _find_lines(source: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the spans of all lines that are not blank, and their numbers, counted from 1."""
    ends, printed = [], []  # of each line: the byte after it, and the number of printed characters up to there
    position = 0
    so_far = 0
    for block in iter(partial(source.read, _BLOCK_BYTES), b""):
        characters = np.frombuffer(block, np.uint8)
        breaks = np.flatnonzero(characters == ord("\n"))
        # NULs, which a power failure leaves in a file, are no blanks: their line is a fault.
        counted = so_far + np.cumsum((characters > ord(" ")) | (characters == 0))
        ends.append(position + breaks)
        printed.append(counted[breaks])
        position += len(block)
        so_far = int(counted[-1])
    stops = np.concatenate([*ends, [position]]).astype(np.int64)
    starts = np.concatenate([[0], stops[:-1] + 1])
    has_text = np.diff(np.concatenate([[0], *printed, [so_far]])) > 0
    return np.stack([starts, stops], axis=1)[has_text], np.flatnonzero(has_text) + 1


def _unpack_list(text: str) -> tuple[_Spool, NDArray[np.int64], None]:
    """Return a copy of a list's records, and their spans. Raises UserError if it is not a list of JSON values."""
    decoder, copy, ends = json.JSONDecoder(), _Spool(TemporaryFile()), [0]  # noqa: SIM115 - as above
    place = _skip_blanks(text, text.index("[") + 1)
    has_more = not text.startswith("]", place)
    while has_more:
        _, end = decoder.raw_decode(text, place)
        ends.append(ends[-1] + copy.file.write(text[place:end].encode()))
        place = _skip_blanks(text, end)
        has_more = text.startswith(",", place)
        if has_more:
            place = _skip_blanks(text, place + 1)
    if text[place:].strip() != "]":
        raise UserError(f"record {len(ends) - 2} of the list is followed by {text[place : place + 20]!r}")
    return copy, np.stack([ends[:-1], ends[1:]], axis=1), None


def _skip_blanks(text: str, place: int) -> int:
    blanks = _BLANKS.match(text, place)
    return blanks.end() if blanks else place


def _unique(pairs: list[tuple[str, Any]]) -> DataRow:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"more than one field {twice!r}: rename or remove all but one")
    return record
