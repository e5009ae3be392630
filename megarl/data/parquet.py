"""Tables in parquet files, read one row group at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.table import DataRow, WantedColumns
from megarl.data.uri import Location, Pinned
from megarl.platform.errors import UserError
from megarl.platform.small_files import Damage, naming, open_file

PART_BYTES = 64 << 20
"""Approximate size of the parts of larger row groups; each part is read separately."""
ROWS_PER_GROUP = 4096
"""Rows per group of the files that `write_rows` writes."""
_BATCH_ROWS, _BATCH_BYTES = 1024, 1 << 20  # decoded at a time, at most
_BUFFER_BYTES = 4 << 20  # fetched at a time of each column, of a row group in parts


def read_own(path: Path, what: str) -> Any:
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


@dataclass(frozen=True)
class ParquetTable:
    """A parquet file whose footer has been read."""

    file: Pinned
    metadata: Any
    columns: Sequence[str]

    @classmethod
    def open(cls, location: Location, wanted: WantedColumns) -> "ParquetTable":
        """Read the footer of a file.

        Raises:
            UserError: the file is missing, is not parquet, lacks a column or has no row.
        """
        with location.open() as source:
            file = location.pin(source)
            source.seek(0)
            try:
                metadata = pq.read_metadata(source)
                found = metadata.schema.to_arrow_schema().names
            except (pa.ArrowException, OSError) as error:
                raise UserError(
                    f"{location.name} cannot be read as parquet: {error} (a JSON file must be named .jsonl or .json, "
                    "perhaps followed by .gz or .zst; `megarl prepare own` converts .csv, .tsv and .arrow)"
                ) from error
        columns = wanted.find(location.name, found)
        if metadata.num_rows == 0:
            raise UserError(f"{location.name} is empty: it has columns but no row")
        return cls(file, metadata, columns)

    @property
    def name(self) -> str:
        """The name as the user wrote it."""
        return self.file.name

    def groups(self) -> "Iterator[ParquetRowGroup]":
        """Yield the row groups that have rows."""
        for number in range(self.metadata.num_row_groups):
            described = self.metadata.row_group(number)
            leaves = (described.column(leaf) for leaf in range(described.num_columns))
            sizes = (leaf.total_uncompressed_size for leaf in leaves if _top(leaf.path_in_schema) in self.columns)
            if described.num_rows:
                yield ParquetRowGroup(self, number, described.num_rows, sum(sizes))

    def row_name(self, number: int) -> str:
        """Return the number of a row, counted from 0."""
        return f"row {number}"


@dataclass(frozen=True)
class ParquetRowGroup:
    """A row group of a parquet file."""

    table: ParquetTable
    number: int
    num_rows: int
    num_bytes: int

    def parts(self, part_bytes: int) -> list[range]:
        """Return the rows of each part, counted from the group's first; a small group is one part."""
        num_parts = min(-(-self.num_bytes // part_bytes) or 1, self.num_rows)
        cuts = (self.num_rows * part // num_parts for part in range(num_parts + 1))
        return [range(start, stop) for start, stop in pairwise(cuts)]

    def read(self, rows: range) -> Iterator[Any]:
        """Yield record batches of a range of rows. Earlier rows of the group must be decoded too."""
        is_small = self.num_bytes <= PART_BYTES
        batch_rows = max(1, min(_BATCH_ROWS, self.num_rows * _BATCH_BYTES // max(self.num_bytes, 1)))
        with self.table.file.open() as source:
            try:
                parquet = pq.ParquetFile(
                    source,
                    metadata=self.table.metadata,
                    pre_buffer=is_small,
                    buffer_size=0 if is_small else _BUFFER_BYTES,
                )
                first = 0
                for batch in parquet.iter_batches(
                    batch_rows, row_groups=[self.number], columns=list(self.table.columns), use_threads=False
                ):
                    start = max(rows.start - first, 0)
                    count = min(rows.stop - first, len(batch)) - start
                    if count > 0:
                        yield _without_views(batch).slice(start, count)
                    first += len(batch)
                    if first >= rows.stop:
                        return
            except Exception as error:  # each filesystem has errors of its own
                group = f"{self.table.name}, row group {self.number}"
                raise UserError(f"{group} cannot be read: {error}") from error

    def decode(self, record: DataRow) -> DataRow:
        """Return the record as it is: its columns are already decoded."""
        return record


def _top(path_in_schema: str) -> str:
    return path_in_schema.partition(".")[0]


def _without_views(batch: Any) -> Any:
    """Return a batch with strings in place of string views: Arrow's `take` does not support views."""
    schema = pa.schema([entry.with_type(_plain(entry.type)) for entry in batch.schema])
    return batch if schema == batch.schema else batch.cast(schema)


def _plain(kind: Any) -> Any:
    if pa.types.is_struct(kind):
        return pa.struct([entry.with_type(_plain(entry.type)) for entry in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_plain(kind.value_type)))
    return {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(kind, kind)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, all with the same keys, to a parquet file, completely or not at all; make a missing directory."""
    table = pa.Table.from_pylist(list(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        pq.write_table(table, part, row_group_size=ROWS_PER_GROUP)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
