"""Rows of parquet files, by position over all files, with errors that name the file and the row."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


class Rows:
    """The rows of one parquet file or several, in order; only the columns asked for are held.

    `columns` must be there, `optional` ones may be. The files are memory-mapped where they are local. Raises ValueError
    for a file that is missing, is not parquet, lacks a column or has no row.
    """

    def __init__(self, files: str | Sequence[str], *, columns: Sequence[str], optional: Sequence[str] = ()) -> None:
        self._files = [files] if isinstance(files, str) else list(files)
        if not self._files:
            raise ValueError("no data files are given")
        self._tables = [_read(file, columns, optional) for file in self._files]
        self._starts = [0, *accumulate(table.num_rows for table in self._tables)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        file = self._file_of(index)
        row: dict[str, Any] = self._tables[file].slice(index - self._starts[file], 1).to_pylist()[0]
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for table in self._tables:
            for batch in table.to_batches():
                yield from batch.to_pylist()

    def place(self, index: int) -> str:
        """Where a row is, for messages."""
        file = self._file_of(index)
        return f"{self._files[file]}, row {index - self._starts[file]}"

    def _file_of(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return bisect_right(self._starts, index) - 1


def _read(file: str, columns: Sequence[str], optional: Sequence[str]) -> Any:
    try:
        schema = pq.read_schema(file)
        missing = [column for column in columns if column not in schema.names]
        if missing:
            raise ValueError(f"{file} has no column {missing[0]!r}; it has {', '.join(schema.names)}")
        present = [column for column in optional if column in schema.names]
        table = pq.read_table(file, columns=[*columns, *present], memory_map="://" not in file)
    except FileNotFoundError as error:
        raise ValueError(f"no such data file: {file}") from error
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read as parquet: {error}") from error
    if table.num_rows == 0:
        raise ValueError(f"{file} is empty: it has columns but not one row")
    return table


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, all with the same keys, to a parquet file; its directory is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
