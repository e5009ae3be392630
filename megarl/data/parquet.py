"""Rows of parquet files, by position over all files, read a row group at a time.

No more is held than a bounded number of bytes of row groups, whatever the size of the files; the smallest unit is one
row group. Errors name the file and the row.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.order import Chunk
from megarl.data.uri import Location, locate

CACHE_BYTES = 512 << 20
"""What decoded row groups may take together, per set of files and rank."""
ROWS_PER_GROUP = 4096
"""Of the files written here."""
_BATCH_ROWS = 1024  # of these, at a time, a scan makes Python objects


class Rows:
    """The rows of one parquet file or several, in order; only the columns asked for are read.

    `columns` must be there, `optional` ones may be. `chunks` are the row groups: rows of one chunk are read together,
    and of the chunks used last as many are kept as `cache_bytes` hold. Raises ValueError for a file that is missing,
    is not parquet, lacks a column or has no row; and when a row is asked for, where its file has gone or changed.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        *,
        columns: Sequence[str],
        optional: Sequence[str] = (),
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        names = [files] if isinstance(files, str) else list(files)
        if not names:
            raise ValueError("no data files are given")
        self._files = [_open(name, columns, optional) for name in names]
        self._first_rows = [0, *accumulate(file.metadata.num_rows for file in self._files)]
        self._groups = [(file, group) for file in self._files for group in file.groups()]
        self.chunks = [file.chunk(group) for file, group in self._groups]
        self._starts = [0, *accumulate(chunk.num_rows for chunk in self.chunks)]
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[int, Any] = OrderedDict()  # chunk -> table, the one used last at the end
        self._held = 0  # bytes in the cache

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        chunk = self._find(index, self._starts)
        row: dict[str, Any] = self._table(chunk).slice(index - self._starts[chunk], 1).to_pylist()[0]
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.scan(range(len(self)))

    def scan(self, rows: range) -> Iterator[dict[str, Any]]:
        """The rows of a run `start .. stop`, in order."""
        start = rows.start
        while start < rows.stop:
            chunk = self._find(start, self._starts)
            stop = min(rows.stop, self._starts[chunk + 1])
            part = self._table(chunk).slice(start - self._starts[chunk], stop - start)
            for batch in part.to_batches(max_chunksize=_BATCH_ROWS):
                yield from batch.to_pylist()
            start = stop

    def place(self, index: int) -> str:
        """Where a row is, for messages."""
        file = self._find(index, self._first_rows)
        return f"{self._files[file].location.name}, row {index - self._first_rows[file]}"

    def _find(self, index: int, starts: Sequence[int]) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return bisect_right(starts, index) - 1

    def _table(self, chunk: int) -> Any:
        if chunk not in self._cache:
            self._make_room(self.chunks[chunk].num_bytes)
            file, group = self._groups[chunk]
            table = file.read(group)
            self._make_room(table.nbytes)  # decoded, it may be larger than the file says
            self._cache[chunk] = table
            self._held += table.nbytes
        self._cache.move_to_end(chunk)
        return self._cache[chunk]

    def _make_room(self, num_bytes: int) -> None:
        while self._cache and self._held + num_bytes > self._cache_bytes:
            _, table = self._cache.popitem(last=False)
            self._held -= table.nbytes


@dataclass(frozen=True)
class _File:
    """A parquet file whose footer has been read; it is opened anew for each row group, and may have gone meanwhile."""

    location: Location
    size: int  # bytes
    metadata: Any
    columns: Sequence[str]

    def groups(self) -> list[int]:
        """The row groups that have rows."""
        groups = range(self.metadata.num_row_groups)
        return [group for group in groups if self.metadata.row_group(group).num_rows]

    def chunk(self, group: int) -> Chunk:
        """The size of a row group, in the columns that are read."""
        described = self.metadata.row_group(group)
        parts = (described.column(number) for number in range(described.num_columns))
        num_bytes = sum(part.total_uncompressed_size for part in parts if _top(part.path_in_schema) in self.columns)
        return Chunk(num_rows=described.num_rows, num_bytes=num_bytes)

    def read(self, group: int) -> Any:
        """The table of a row group; ValueError where the file is not what it was."""
        try:
            source = self.location.open()
        except ValueError as error:
            raise ValueError(f"{error}; it is read as long as the run goes on: bring it back, and resume") from error
        with source:
            try:
                if source.size() != self.size:
                    raise ValueError("it has changed since this run opened it: put it back, or start the run again")
                parquet = pq.ParquetFile(source, metadata=self.metadata, pre_buffer=True)
                return parquet.read_row_group(group, columns=list(self.columns), use_threads=False)
            except Exception as error:  # each filesystem has errors of its own
                raise ValueError(f"{self.location.name}, row group {group} cannot be read: {error}") from error


def _open(name: str, columns: Sequence[str], optional: Sequence[str]) -> _File:
    location = locate(name)
    with location.open() as source:
        try:
            metadata = pq.read_metadata(source)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{name} cannot be read as parquet: {error}") from error
        size = source.size()
    found = metadata.schema.to_arrow_schema().names
    if missing := [column for column in columns if column not in found]:
        raise ValueError(f"{name} has no column {missing[0]!r}; it has {', '.join(found)}")
    if metadata.num_rows == 0:
        raise ValueError(f"{name} is empty: it has columns but not one row")
    present = [column for column in optional if column in found]
    return _File(location, size, metadata, [*columns, *present])


def _top(path_in_schema: str) -> str:
    return path_in_schema.partition(".")[0]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, all with the same keys, to a parquet file; its directory is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=ROWS_PER_GROUP)
