"""Reading parquet: from any location, only the requested columns, and the messages about unreadable files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.parquet import ParquetTable, write_rows
from megarl.data.rows import Rows
from megarl.data.table import WantedColumns
from megarl.data.uri import locate


def table(start: int, stop: int) -> Any:
    """Write rows with their number, and a column that is not requested."""
    numbers = range(start, stop)
    nested = [{"truth": {"number": number}} for number in numbers]
    return pa.table({"number": list(numbers), "nested": nested, "bulk": [f"{number:01000}" for number in numbers]})


def write(path: Path, start: int, stop: int, *, rows_per_group: int = 4) -> str:
    pq.write_table(table(start, stop), path, row_group_size=rows_per_group)
    return str(path)


def numbers(rows: Rows) -> list[int]:
    return [row["number"] for row in rows]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Write 25 rows in two files: groups of 4 4 2, and 4 4 4 3."""
    return [write(tmp_path / "a.parquet", 0, 10), write(tmp_path / "b.parquet", 10, 25)]


def test_rows_of_several_files_are_read_in_order(files: list[str]) -> None:
    rows = Rows(files, columns=["number", "nested"])
    assert len(rows) == 25
    for index in (0, 3, 4, 9, 10, 13, 24, 2):
        assert rows[index] == {"number": index, "nested": {"truth": {"number": index}}}
    assert numbers(rows) == list(range(25))
    assert rows.place(12) == f"{files[1]}, row 2"
    for outside in (-1, 25):
        with pytest.raises(IndexError, match=f"row {outside} of 25"):
            rows[outside]


def test_only_columns_that_are_asked_for_are_read(files: list[str]) -> None:
    assert Rows(files, columns=["number"])[0].keys() == {"number"}
    table = ParquetTable.read(locate(files[0]), WantedColumns(required=("number",), optional=("absent",)))
    assert table.columns.keys() == {"number"}
    assert Rows(files, columns=[], optional=["absent"])[24] == {}


def test_rows_outlive_their_files(files: list[str]) -> None:
    rows = Rows(files, columns=["number"])
    Path(files[1]).unlink()
    write(Path(files[0]), 100, 101)
    assert numbers(rows) == list(range(25))


def test_written_rows_are_read_back(tmp_path: Path) -> None:
    write_rows(tmp_path / "deep" / "rows.parquet", [{"number": number} for number in range(10_000)])
    assert numbers(Rows(str(tmp_path / "deep" / "rows.parquet"), columns=["number"])) == list(range(10_000))


@pytest.fixture
def in_memory() -> Iterator[str]:
    with fsspec.open("memory://data/rows.parquet", "wb") as file:
        pq.write_table(table(0, 10), file, row_group_size=4)
    yield "memory://data/rows.parquet"
    fsspec.filesystem("memory").rm("/data", recursive=True)


def test_uris_of_pyarrow_and_of_fsspec(files: list[str], in_memory: str) -> None:
    rows = Rows([f"file://{files[1]}", in_memory, files[0]], columns=["number"])
    assert numbers(rows) == [*range(10, 25), *range(10), *range(10)]
    assert rows.place(16) == f"{in_memory}, row 1"
    with pytest.raises(ValueError, match="no such data file: memory://data/other.parquet"):
        Rows("memory://data/other.parquet", columns=["number"])


def test_uris_that_nothing_opens() -> None:
    with pytest.raises(ValueError, match=r"nosuch://x/y.parquet cannot be opened: .*nosuch.*check the name"):
        Rows("nosuch://x/y.parquet", columns=["number"])
    with pytest.raises(ValueError, match=r"hdfs://127.0.0.1:1/y.parquet cannot be opened: .*CLASSPATH="):
        Rows("hdfs://127.0.0.1:1/y.parquet", columns=["number"])
