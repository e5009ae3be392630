"""Rows of data files, by number over all files; parquet and JSON files are read alike.

The requested columns are in memory. A row becomes Python values when it is read. Errors name the file and the row.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from megarl.data.json_lines import JsonTable, holds_json
from megarl.data.parquet import ParquetTable
from megarl.data.table import DataRow, WantedColumns
from megarl.data.uri import locate
from megarl.platform.errors import UserError, placed
from megarl.section import listed

RowTable = JsonTable | ParquetTable
"""The rows of one file, at least one. An error of a row begins with its `row_name`."""
MAX_DEPTH = 100
"""Most levels of lists and named values in a value."""


class Rows:
    """The rows of one or more data files, in order.

    Only the requested columns are read: `columns` must exist, `optional` columns may be missing.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        *,
        columns: Sequence[str],
        optional: Sequence[str] = (),
        remedies: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Read the files; `remedies` are advice for messages about a missing column.

        Raises:
            UserError: a file is missing, cannot be read, lacks a column, has it twice or has no row; every such file
                is named. Later, when a row is read: the row is damaged.
        """
        self.names = listed(files)
        if not self.names:
            raise UserError("no data files are given")
        wanted = WantedColumns(required=tuple(columns), optional=tuple(optional), remedies=remedies)
        self._tables = _read_all(self.names, wanted)
        self._starts = [0, *accumulate(map(len, self._tables))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> DataRow:
        table, number = self._find(index)
        with placed(f"{table.name}, "):
            row = table[number]
        for name, value in row.items():
            if _is_deep(value):
                raise UserError(f"{self.place(index)}, column {name}: the value is nested more than {MAX_DEPTH} deep")
        return row

    def __iter__(self) -> Iterator[DataRow]:
        return map(self.__getitem__, range(len(self)))

    @property
    def file_starts(self) -> Sequence[int]:
        """The number of the first row of each file."""
        return self._starts[:-1]

    def place(self, index: int) -> str:
        """Return the file and the number of a row, for messages."""
        table, number = self._find(index)
        return f"{table.name}, {table.row_name(number)}"

    def _find(self, index: int) -> tuple[RowTable, int]:
        """Return the file of a row, and the number of the row in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        file = bisect_right(self._starts, index) - 1
        return self._tables[file], index - self._starts[file]


def _read_all(names: Sequence[str], wanted: WantedColumns) -> list[RowTable]:
    tables: list[RowTable] = []
    faults = []
    for name in names:
        try:
            location = locate(name)
            tables.append((JsonTable if holds_json(location) else ParquetTable).read(location, wanted))
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("\n".join(faults))
    return tables


def _is_deep(value: object) -> bool:
    """Return whether a value is nested so deeply that Python cannot copy or compare it."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
