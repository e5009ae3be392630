"""Rows of data files, by number over all files; parquet and JSON files are read alike.

The memory is bounded, whatever the size of the files and of their row groups. Errors name the file and the row.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.data.json_lines import JsonTable, holds_json
from megarl.data.order import Chunk
from megarl.data.parquet import PART_BYTES, ParquetTable
from megarl.data.table import DataRow, Group, Table, Wanted
from megarl.data.uri import locate
from megarl.platform.errors import UserError

MAX_DEPTH = 100
"""Most levels of lists and named values in a value."""
CACHE_BYTES = 512 << 20
"""Size of the cache of decoded rows, per set of files and rank."""


class Rows:
    """The rows of one or more data files, in order; only the requested columns are read.

    `columns` must exist, `optional` columns may be missing. `chunks` are the groups of rows, or the parts of a group
    that has more than `part_bytes`: the rows of a chunk are read together, and a cache of `cache_bytes` keeps the
    chunks that were used last.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        *,
        columns: Sequence[str],
        optional: Sequence[str] = (),
        remedies: Mapping[str, str] = MappingProxyType({}),
        cache_bytes: int = CACHE_BYTES,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """Open the files; `remedies` are advice for messages about a missing column.

        Raises:
            UserError: a file is missing, cannot be read, lacks a column, has it twice or has no row; every such file
                is named. Later, when a row is read: its file was removed or changed, or the row cannot be read.
        """
        names = [files] if isinstance(files, str) else list(files)
        if not names:
            raise UserError("no data files are given")
        wanted = Wanted(required=tuple(columns), optional=tuple(optional), remedies=remedies)
        self._tables = _open_all(names, wanted)
        groups = [list(table.groups()) for table in self._tables]
        self._table_starts = _starts(sum(group.num_rows for group in of_table) for of_table in groups)
        self._groups: list[Group] = [group for of_table in groups for group in of_table]
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
        return self._table_starts[-1]

    def __getitem__(self, index: int) -> DataRow:
        part = self._find(index, self._part_starts)
        group, _ = self._parts[part]
        return next(self._decode(group, self._table(part).slice(index - self._part_starts[part], 1), index))

    def __iter__(self) -> Iterator[DataRow]:
        return self.scan(range(len(self)))

    def scan(self, rows: range) -> Iterator[DataRow]:
        """Yield the rows `start .. stop` in order, without using the cache."""
        index = rows.start
        for group, (first, end) in zip(self._groups, pairwise(self._group_starts), strict=True):
            if first < rows.stop and rows.start < end:
                for batch in group.read(range(max(rows.start - first, 0), min(rows.stop, end) - first)):
                    yield from self._decode(group, batch, index)
                    index += len(batch)

    @property
    def file_starts(self) -> Sequence[int]:
        """The number of the first row of each file."""
        return self._table_starts[:-1]

    def place(self, index: int) -> str:
        """Return the file and the number of a row, for messages."""
        number = self._find(index, self._table_starts)
        table = self._tables[number]
        return f"{table.name}, {table.row_name(index - self._table_starts[number])}"

    def _find(self, index: int, starts: Sequence[int]) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return bisect_right(starts, index) - 1

    def _decode(self, group: Group, batch: Any, first: int) -> Iterator[DataRow]:
        """Yield the rows of a batch whose first row is row `first`."""
        try:
            records = batch.to_pylist()
        except (ValueError, OverflowError):  # not UTF-8, or a time that Python cannot represent
            records = (self._by_column(batch.slice(place, 1), first + place) for place in range(len(batch)))
        for index, record in enumerate(records, start=first):
            try:
                row = group.decode(record)
                _require_depth(row)
            except UserError as error:
                raise UserError(f"{self.place(index)}: {error}") from error
            yield row

    def _by_column(self, row: Any, index: int) -> DataRow:
        """Return the only row of a table; UserError names the column that cannot be read."""
        record = {}
        for name in row.schema.names:
            try:
                record[name] = row[name].to_pylist()[0]
            except UnicodeDecodeError as error:
                raise UserError(f"{self.place(index)}, column {name}: the text is not UTF-8: {error}") from error
            except (ValueError, OverflowError) as error:
                raise UserError(f"{self.place(index)}, column {name}: the value cannot be read: {error}") from error
        return record

    def _table(self, part: int) -> Any:
        if part not in self._cache:
            self._make_room(self.chunks[part].num_bytes)
            group, rows = self._parts[part]
            table = pa.Table.from_batches(group.read(rows))
            table = table.take(np.arange(len(table))).combine_chunks()  # copied: a slice would hold its batch
            self._make_room(table.nbytes)  # the decoded table may be larger than the file states
            self._cache[part] = table
            self._held += table.nbytes
        self._cache.move_to_end(part)
        return self._cache[part]

    def _make_room(self, num_bytes: int) -> None:
        while self._cache and self._held + num_bytes > self._cache_bytes:
            _, table = self._cache.popitem(last=False)
            self._held -= table.nbytes


def _open_all(names: Sequence[str], wanted: Wanted) -> list[Table]:
    tables: list[Table] = []
    faults = []
    for name in names:
        try:
            location = locate(name)
            tables.append((JsonTable if holds_json(location) else ParquetTable).open(location, wanted))
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("\n".join(faults))
    return tables


def _require_depth(row: DataRow) -> None:
    """Raise UserError if values are nested so deeply that Python cannot copy or compare them."""
    for name, value in row.items():
        level = [value]
        depth = 0
        while level and depth < MAX_DEPTH:
            level = [inner for outer in level for inner in _inside(outer)]
            depth += 1
        if level:
            raise UserError(f"column {name}: the value is nested more than {MAX_DEPTH} deep")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _starts(sizes: Iterable[int]) -> list[int]:
    """Return the start of each of a sequence of ranges with these sizes, and the end of the last."""
    return [0, *accumulate(sizes)]
