"""Rows of parquet files, by position over all files, read a row group at a time, or a part of a large one.

No more is held than a bounded number of bytes, whatever the size of the files and of their row groups. Errors name the
file and the row.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.order import Chunk
from megarl.data.uri import Location, locate

CACHE_BYTES = 512 << 20
"""What is kept of decoded rows, per set of files and rank."""
PART_BYTES = 64 << 20
"""Row groups that are larger are read in parts of about this size."""
ROWS_PER_GROUP = 4096
"""Of the files written here."""
_BATCH_ROWS, _BATCH_BYTES = 1024, 1 << 20  # decoded at a time, at most
_BUFFER_BYTES = 4 << 20  # fetched at a time of each column, of a row group in parts


class Rows:
    """The rows of one parquet file or several, in order; only the columns asked for are read.

    `columns` must be there, `optional` ones may be. `chunks` are the row groups, or their parts where one has more than
    `part_bytes`: rows of one chunk are read together, and of the chunks used last as many are kept as `cache_bytes`
    hold. Raises ValueError for a file that is missing, is not parquet, lacks a column or has no row; and when a row is
    asked for, where its file has gone or changed.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        *,
        columns: Sequence[str],
        optional: Sequence[str] = (),
        cache_bytes: int = CACHE_BYTES,
        part_bytes: int = PART_BYTES,
    ) -> None:
        names = [files] if isinstance(files, str) else list(files)
        if not names:
            raise ValueError("no data files are given")
        self._files = [_open(name, columns, optional) for name in names]
        self._file_starts = _starts(file.metadata.num_rows for file in self._files)
        self._groups = [group for file in self._files for group in file.groups()]
        self._group_starts = _starts(group.num_rows for group in self._groups)
        self._parts = [(group, rows) for group in self._groups for rows in group.parts(part_bytes)]
        self._part_starts = _starts(len(rows) for _, rows in self._parts)
        self.chunks = [
            Chunk(num_rows=len(rows), num_bytes=group.num_bytes * len(rows) // group.num_rows)
            for group, rows in self._parts
        ]
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[int, Any] = OrderedDict()  # part -> table, the one used last at the end
        self._held = 0  # bytes in the cache

    def __len__(self) -> int:
        return self._file_starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        part = self._find(index, self._part_starts)
        row: dict[str, Any] = self._table(part).slice(index - self._part_starts[part], 1).to_pylist()[0]
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.scan(range(len(self)))

    def scan(self, rows: range) -> Iterator[dict[str, Any]]:
        """The rows of a run `start .. stop`, in order; none is kept."""
        for group, (first, end) in zip(self._groups, pairwise(self._group_starts), strict=True):
            if first < rows.stop and rows.start < end:
                for batch in group.read(range(max(rows.start - first, 0), min(rows.stop, end) - first)):
                    yield from batch.to_pylist()

    def place(self, index: int) -> str:
        """Where a row is, for messages."""
        file = self._find(index, self._file_starts)
        return f"{self._files[file].location.name}, row {index - self._file_starts[file]}"

    def _find(self, index: int, starts: Sequence[int]) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return bisect_right(starts, index) - 1

    def _table(self, part: int) -> Any:
        if part not in self._cache:
            self._make_room(self.chunks[part].num_bytes)
            group, rows = self._parts[part]
            table = pa.Table.from_batches(group.read(rows))
            table = table.take(np.arange(len(table))).combine_chunks()  # copied: a slice would hold its batch
            self._make_room(table.nbytes)  # decoded, it may be larger than the file says
            self._cache[part] = table
            self._held += table.nbytes
        self._cache.move_to_end(part)
        return self._cache[part]

    def _make_room(self, num_bytes: int) -> None:
        while self._cache and self._held + num_bytes > self._cache_bytes:
            _, table = self._cache.popitem(last=False)
            self._held -= table.nbytes


@dataclass(frozen=True)
class _File:
    """A parquet file whose footer has been read; it is opened anew for each read, and may have gone meanwhile."""

    location: Location
    size: int  # bytes
    metadata: Any
    columns: Sequence[str]

    def groups(self) -> "Iterator[_Group]":
        """The row groups that have rows."""
        for number in range(self.metadata.num_row_groups):
            described = self.metadata.row_group(number)
            leaves = (described.column(leaf) for leaf in range(described.num_columns))
            sizes = (leaf.total_uncompressed_size for leaf in leaves if _top(leaf.path_in_schema) in self.columns)
            if described.num_rows:
                yield _Group(self, number, described.num_rows, sum(sizes))

    def open(self) -> Any:
        """The file again; ValueError where it is not what it was."""
        try:
            source = self.location.open()
        except ValueError as error:
            raise ValueError(f"{error}; it is read as long as the run goes on: bring it back, and resume") from error
        if source.size() != self.size:
            source.close()
            raise ValueError(
                f"{self.location.name} has changed since this run opened it: put it back, or start the run again"
            )
        return source


@dataclass(frozen=True)
class _Group:
    """A row group."""

    file: _File
    number: int
    num_rows: int
    num_bytes: int  # uncompressed, by the file's own account, of the columns that are read

    def parts(self, part_bytes: int) -> list[range]:
        """The rows of each part, counted from the group's first; all of them where they are small enough."""
        num_parts = min(-(-self.num_bytes // part_bytes) or 1, self.num_rows)
        cuts = (self.num_rows * part // num_parts for part in range(num_parts + 1))
        return [range(start, stop) for start, stop in pairwise(cuts)]

    def read(self, rows: range) -> Iterator[Any]:
        """Record batches of a run of rows. Those before it are decoded too, as no row is found otherwise."""
        at_once = self.num_bytes <= PART_BYTES
        batch_rows = max(1, min(_BATCH_ROWS, self.num_rows * _BATCH_BYTES // max(self.num_bytes, 1)))
        with self.file.open() as source:
            try:
                parquet = pq.ParquetFile(
                    source,
                    metadata=self.file.metadata,
                    pre_buffer=at_once,
                    buffer_size=0 if at_once else _BUFFER_BYTES,
                )
                first = 0
                for batch in parquet.iter_batches(
                    batch_rows, row_groups=[self.number], columns=list(self.file.columns), use_threads=False
                ):
                    start = max(rows.start - first, 0)
                    if (count := min(rows.stop - first, len(batch)) - start) > 0:
                        yield batch.slice(start, count)
                    first += len(batch)
                    if first >= rows.stop:
                        return
            except Exception as error:  # each filesystem has errors of its own
                where = f"{self.file.location.name}, row group {self.number}"
                raise ValueError(f"{where} cannot be read: {error}") from error


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


def _starts(sizes: Iterable[int]) -> list[int]:
    """Where each begins that comes behind the others, and where the last ends."""
    return [0, *accumulate(sizes)]


def _top(path_in_schema: str) -> str:
    return path_in_schema.partition(".")[0]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, all with the same keys, to a parquet file; its directory is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=ROWS_PER_GROUP)
