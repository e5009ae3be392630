"""Parquet files: their columns in memory, and the files that megarl writes."""

import io
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.table import DataRow, WantedColumns
from megarl.data.uri import Location
from megarl.platform.errors import UserError
from megarl.platform.files import replacing
from megarl.platform.secrets import beginning
from megarl.platform.small_files import Damage, naming, open_file

SHOWN_OF_VALUE = 100  # characters
_MISFITS = (pa.ArrowException, OverflowError, UnicodeError)
"""Errors of Arrow for values that no column can hold together."""


@dataclass(frozen=True)
class OwnFile:
    """A parquet file that megarl wrote. Its checksums are verified.

    Reading raises Damage if the file is missing or damaged.
    """

    path: Path
    what: str  # its content, for messages
    schema: pa.Schema
    groups: Sequence[range]  # the rows of each row group

    @classmethod
    def find(cls, path: Path, what: str) -> "OwnFile":
        """Read the columns and the row groups of a file."""
        with _opened(path, what) as parquet:
            counts = (parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups))
            ends = [0, *accumulate(counts)]
            return cls(path, what, parquet.schema_arrow, [range(*both) for both in pairwise(ends)])

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.groups[-1].stop if self.groups else 0

    def rows(self, rows: range | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Return those of the given rows that the file has, by default all, with some columns.

        Only the row groups of these rows are read.
        """
        wanted = range(self.num_rows) if rows is None else rows
        chosen = [
            number
            for number, group in enumerate(self.groups)
            if group.start < wanted.stop and wanted.start < group.stop
        ]
        if not chosen:
            table = self.schema.empty_table()
            return table if columns is None else table.select(columns)
        with _opened(self.path, self.what) as parquet:
            table = parquet.read_row_groups(chosen, columns=columns)
        first = self.groups[chosen[0]].start
        last = self.groups[chosen[-1]].stop
        if len(table) != last - first:
            raise Damage(self.path, f"cannot be read as {self.what}: it has {len(table)} of {last - first} rows")
        start = max(wanted.start - first, 0)
        return table.slice(start, min(wanted.stop, last) - first - start)

    def num_values(self, column: str) -> list[int]:
        """Return the number of values in a column of lists, of each row group. No row is read."""
        with _opened(self.path, self.what) as parquet:
            groups = [parquet.metadata.row_group(number) for number in range(len(self.groups))]
            chunks = [group.column(place) for group in groups for place in range(group.num_columns)]
            return [chunk.num_values for chunk in chunks if chunk.path_in_schema.partition(".")[0] == column]

    def take(self, rows: npt.NDArray[np.int64], columns: Sequence[str]) -> pa.Table:
        """Return the given rows, ascending, with some columns. The row groups are read one after the other."""
        tables = [self.schema.empty_table().select(columns)]
        with _opened(self.path, self.what) as parquet:
            for number, group in enumerate(self.groups):
                first, last = rows.searchsorted([group.start, group.stop])
                if first < last:
                    table = parquet.read_row_group(number, columns=columns)
                    tables.append(table.take(rows[first:last] - group.start))
        return pa.concat_tables(tables)


@contextmanager
def _opened(path: Path, what: str) -> Iterator[pq.ParquetFile]:
    """Open a file that megarl wrote, and turn errors of the block into Damage."""
    with naming(path):
        file = open_file(path)
    try:
        with file:
            yield pq.ParquetFile(file, page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Damage(path, f"cannot be read as {what}: {error}") from error


def write_rows(path: Path, rows: Sequence[Mapping[str, object]], note: Mapping[bytes, bytes] | None = None) -> None:
    """Write rows, all with the same keys, to a parquet file, completely or not at all; make a missing directory.

    `note` is metadata of the file.

    Raises:
        UserError: parquet cannot hold a value; names the first.
    """
    try:
        table = pa.Table.from_pylist(list(rows)).replace_schema_metadata(note)
        pq.write_table(table.slice(0, 0), io.BytesIO())  # of some types it can hold no value
    except _MISFITS as error:
        raise UserError(f"{path}, {_misfit(rows)}: write all values alike, for example as texts") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        pq.write_table(table, file)


def _misfit(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the column of the first value that parquet cannot hold, with its row if the rows before decide on it."""
    for name in rows[0]:
        values = [row[name] for row in rows]
        try:
            pq.write_table(pa.table({name: pa.array(values)}).slice(0, 0), io.BytesIO())
        except _MISFITS as error:
            first = _first_misfit(values)
            if first == len(values):
                return f"column {name}: {error}"
            value = beginning(repr(values[first]), SHOWN_OF_VALUE)
            return f"row {first}, column {name}: {value} does not fit the values of the rows before ({error})"
    raise AssertionError("no column has such a value")


def _first_misfit(values: Sequence[object]) -> int:
    """Return the place of the first value that has no type of Arrow in common with those before; the end if none is."""
    return bisect_left(range(len(values)), True, key=lambda place: _is_mixed(values[: place + 1]))


def _is_mixed(values: Sequence[object]) -> bool:
    """Return whether no type of Arrow has all these values."""
    try:
        pa.array(values)
    except _MISFITS:
        return True
    return False


@dataclass(frozen=True)
class ParquetTable:
    """The wanted columns of a parquet file."""

    name: str
    num_rows: int
    columns: Mapping[str, pa.ChunkedArray]  # by name

    @classmethod
    def read(cls, location: Location, wanted: WantedColumns) -> "ParquetTable":
        """Read the wanted columns of a file.

        Raises:
            UserError: the file is missing, is not parquet, lacks a column, has no row or is damaged.
        """
        with location.open() as source:
            try:
                parquet = pq.ParquetFile(source)
                found = parquet.schema_arrow.names
            except (pa.ArrowException, OSError) as error:
                raise UserError(
                    f"{location.name} cannot be read as parquet: {error} (a JSON file must be named .jsonl or .json, "
                    "perhaps followed by .gz or .zst; `megarl prepare own` converts .csv, .tsv and .arrow)"
                ) from error
            columns = wanted.find(location.name, found)
            if parquet.metadata.num_rows == 0:
                raise UserError(f"{location.name} is empty: it has columns but no row")
            groups = []
            for number in range(parquet.num_row_groups):
                try:
                    groups.append(parquet.read_row_group(number, columns=list(columns)))
                except Exception as error:  # each filesystem has errors of its own
                    raise UserError(f"{location.name}, row group {number} cannot be read: {error}") from error
        table = pa.concat_tables(groups)
        return cls(location.name, parquet.metadata.num_rows, {name: table[name] for name in columns})

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, number: int) -> DataRow:
        """Return a row. Raises UserError, naming row and column, for a value that Python cannot represent."""
        row = {}
        for name, values in self.columns.items():
            try:
                row[name] = values[number].as_py()
            except UnicodeDecodeError as error:
                raise UserError(f"row {number}, column {name}: the text is not UTF-8: {error}") from error
            except (ValueError, OverflowError) as error:
                raise UserError(f"row {number}, column {name}: the value cannot be read: {error}") from error
        return row

    def row_name(self, number: int) -> str:
        """Return the number of a row, counted from 0."""
        return f"row {number}"
