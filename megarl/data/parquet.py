"""Parquet files: their columns in memory, and the files that megarl writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.table import DataRow, WantedColumns
from megarl.data.uri import Location
from megarl.platform.errors import UserError
from megarl.platform.files import replacing
from megarl.platform.small_files import Damage, naming, open_file


def read_own(path: Path, what: str) -> pa.Table:
    """Return the table in a file that megarl wrote, with its checksums verified.

    Raises:
        Damage: the file is missing or damaged; `what` names its content.
    """
    with naming(path):
        file = open_file(path)
    try:
        with file:
            return pq.ParquetFile(file, page_checksum_verification=True).read()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Damage(path, f"cannot be read as {what}: {error}") from error


def write_rows(path: Path, rows: Sequence[Mapping[str, object]], note: Mapping[bytes, bytes] | None = None) -> None:
    """Write rows, all with the same keys, to a parquet file, completely or not at all; make a missing directory.

    `note` is metadata of the file.
    """
    table = pa.Table.from_pylist(list(rows)).replace_schema_metadata(note)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        pq.write_table(table, file)


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
