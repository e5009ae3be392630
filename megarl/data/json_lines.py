"""JSON files: a record on each line, or one list of records; perhaps compressed.

A record is parsed when its row is read, so values keep their own types.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

import pyarrow as pa

from megarl.data.table import DataRow, WantedColumns
from megarl.data.uri import Location
from megarl.platform.errors import UserError, placed

LINES = (".jsonl", ".ndjson")
LIST = ".json"
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_BLANKS = re.compile(r"\s*")


class JsonRecord(NamedTuple):
    """The text of a record, and its place in the file, for messages."""

    place: str
    text: bytes | str

    def parse(self) -> DataRow:
        """Return the record.

        Raises:
            UserError: the record is not a JSON object, or has a field twice.
        """
        try:
            record = json.loads(self.text, object_pairs_hook=_unique)
        except UserError as error:
            raise UserError(f"{self.place}: {error}") from error
        except RecursionError as error:
            raise UserError(f"{self.place}: the record is nested too deeply") from error
        except ValueError as error:  # also a number of more digits than Python reads
            raise UserError(f"{self.place}: a record must be one line of JSON in UTF-8: {error}") from error
        if not isinstance(record, dict):
            shown = repr(self.text[:100])
            raise UserError(f"{self.place}: a record must be a JSON object with named fields, not {shown}")
        return record


@dataclass(frozen=True)
class JsonTable:
    """The records of a JSON file."""

    name: str
    records: Sequence[JsonRecord]
    wanted: WantedColumns

    @classmethod
    def read(cls, location: Location, wanted: WantedColumns) -> "JsonTable":
        """Find the records of a file.

        Raises:
            UserError: the file is missing, is not JSON, has no record, or its first record lacks a column.
        """
        try:
            records = list(_records(_unpacked(location)))
        except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
            raise UserError(f"{location.name} cannot be read as JSON: {error}") from error
        if not records:
            raise UserError(f"{location.name} is empty: it has no record")
        with placed(f"{location.name}, "):
            first = records[0].parse()
        wanted.find(location.name, first)
        return cls(location.name, records, wanted)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> DataRow:
        """Return the wanted fields of a record; a required field that it lacks is None."""
        found = self.records[number].parse()
        optional = {name: found[name] for name in self.wanted.optional if name in found}
        return {name: found.get(name) for name in self.wanted.required} | optional

    def row_name(self, number: int) -> str:
        """Return the line of a row, counted from 1; in a list its number, counted from 0."""
        return self.records[number].place


def holds_json(location: Location) -> bool:
    """Return whether the name of a file is that of a JSON file."""
    suffixes = [*reversed(PurePosixPath(location.path).suffixes), ""]
    return suffixes[suffixes[0] in CODECS] in (*LINES, LIST)


def _unpacked(location: Location) -> bytes:
    """Return the text of a file, without its compression and its byte order mark."""
    codec = CODECS.get(PurePosixPath(location.path).suffix)
    with location.open() as source:
        text: bytes = (pa.CompressedInputStream(source, codec) if codec else source).read()
    return text.removeprefix(b"\xef\xbb\xbf")


def _records(text: bytes) -> Iterator[JsonRecord]:
    """Yield the records of a list, or the lines that are not blank.

    Raises:
        UserError: a list has something between its records.
    """
    if text.lstrip().startswith(b"["):
        for number, record in enumerate(_items(text.decode())):
            yield JsonRecord(f"row {number}", record)
        return
    for number, line in enumerate(text.split(b"\n"), start=1):
        if line.strip():
            yield JsonRecord(f"line {number}", line)


def _items(text: str) -> Iterator[str]:
    """Yield the text of each value of a list."""
    decoder = json.JSONDecoder()
    place = _skip_blanks(text, text.index("[") + 1)
    number = -1
    has_more = not text.startswith("]", place)
    while has_more:
        number += 1
        _, end = decoder.raw_decode(text, place)
        yield text[place:end]
        place = _skip_blanks(text, end)
        has_more = text.startswith(",", place)
        if has_more:
            place = _skip_blanks(text, place + 1)
    if text[place:].strip() != "]":
        raise UserError(f"record {number} of the list is followed by {text[place : place + 20]!r}")


def _skip_blanks(text: str, place: int) -> int:
    blanks = _BLANKS.match(text, place)
    return blanks.end() if blanks else place


def _unique(pairs: list[tuple[str, object]]) -> DataRow:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"more than one field {twice!r}: rename or remove all but one")
    return record
