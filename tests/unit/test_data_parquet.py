"""Reading parquet: from any location, one row group at a time, and the messages about unreadable files."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data import order, parquet
from megarl.data import rows as rows_of_files
from megarl.data.order import Chunk, Order, Position
from megarl.data.parquet import write_rows
from megarl.data.rows import Rows


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
    assert [chunk.num_rows for chunk in rows.chunks] == [4, 4, 2, 4, 4, 4, 3]
    for index in (0, 3, 4, 9, 10, 13, 24, 2):
        assert rows[index] == {"number": index, "nested": {"truth": {"number": index}}}
    assert numbers(rows) == list(range(25))
    assert [row["number"] for row in rows.scan(range(3, 12))] == list(range(3, 12))
    assert rows.place(12) == f"{files[1]}, row 2"
    for outside in (-1, 25):
        with pytest.raises(IndexError, match=f"row {outside} of 25"):
            rows[outside]


def test_only_columns_that_are_asked_for_are_read(files: list[str]) -> None:
    asked, all_columns = Rows(files, columns=["number"]), Rows(files, columns=["number", "nested", "bulk"])
    assert asked[0].keys() == {"number"}
    assert asked.chunks[0].num_bytes < 200 < 1000 <= all_columns.chunks[0].num_bytes


class Reads:
    """Counts how often each row group of each file is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: list[tuple[str, int]] = []
        read = parquet.ParquetRowGroup.read

        def count(group: Any, rows: range) -> Any:
            self.groups.append((Path(group.table.name).name, group.number))
            return read(group, rows)

        monkeypatch.setattr(parquet.ParquetRowGroup, "read", count)


def test_row_groups_used_last_are_kept(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    rows = Rows(files, columns=["number", "bulk"], cache_bytes=12_000)  # two groups of four kilobytes
    for index in (0, 5, 1, 6, 12, 7, 3):
        assert rows[index]["number"] == index
    a0, a1, b0 = ("a.parquet", 0), ("a.parquet", 1), ("b.parquet", 0)
    # reading row 12 evicts the least recently used group 0, so row 7 is still cached and row 3 is not
    assert reads.groups == [a0, a1, b0, a0]


def test_windowed_epoch_reads_each_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "rows.parquet", 0, 400, rows_per_group=10)
    window = 4 * 10 * 8  # bytes of four groups
    rows = Rows(file, columns=["number"], cache_bytes=2 * window)
    chunks = [Chunk(num_rows=chunk.num_rows, num_bytes=10 * 8) for chunk in rows.chunks]
    batches = Order(chunks, batch_size=16, shuffle=True, seed=3, window_bytes=window)
    reads, position, seen = Reads(monkeypatch), Position(), []
    for _ in range(batches.steps_per_epoch):
        taken, position = batches.take(position)
        seen += [rows[index]["number"] for index in taken]
    assert sorted(seen) == list(range(400))
    assert sorted(reads.groups) == [("rows.parquet", group) for group in range(40)]


def test_a_window_is_half_of_the_cache() -> None:
    assert 2 * order.WINDOW_BYTES <= rows_of_files.CACHE_BYTES


def test_removed_or_changed_file_is_named_while_reading(files: list[str], tmp_path: Path) -> None:
    rows = Rows(files, columns=["number"], cache_bytes=0)
    assert rows[12]["number"] == 12
    Path(files[1]).rename(tmp_path / "away.parquet")
    with pytest.raises(ValueError, match=r"no such data file: .*b.parquet; the run reads it until .* restore it"):
        rows[20]
    assert rows[3]["number"] == 3
    write(tmp_path / "b.parquet", 10, 24)
    with pytest.raises(ValueError, match=r"b.parquet has changed since this run opened it: restore it"):
        rows[20]
    (tmp_path / "away.parquet").replace(files[1])
    assert rows[20]["number"] == 20


def test_files_are_written_in_separately_readable_row_groups(tmp_path: Path) -> None:
    write_rows(tmp_path / "deep" / "rows.parquet", [{"number": number} for number in range(10_000)])
    rows = Rows(str(tmp_path / "deep" / "rows.parquet"), columns=["number"])
    assert [chunk.num_rows for chunk in rows.chunks] == [4096, 4096, 1808]


@pytest.mark.parametrize("part_bytes", [1, 300, 1000, 10_000])
def test_large_row_groups_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(parquet, "_BATCH_ROWS", 7)
    monkeypatch.setattr(parquet, "PART_BYTES", part_bytes)
    file = write(tmp_path / "rows.parquet", 0, 100, rows_per_group=60)  # 40 rows are left for the second
    rows = Rows(file, columns=["number"], cache_bytes=0, part_bytes=part_bytes)
    whole = Rows(file, columns=["number"]).chunks
    assert len(rows.chunks) == sum(min(-(-chunk.num_bytes // part_bytes), chunk.num_rows) for chunk in whole)
    assert sum(chunk.num_rows for chunk in rows.chunks) == 100
    assert all(chunk.num_bytes <= part_bytes or chunk.num_rows == 1 for chunk in rows.chunks)
    assert [rows[index]["number"] for index in range(100)] == numbers(rows) == list(range(100))
    assert [row["number"] for row in rows.scan(range(33, 77))] == list(range(33, 77))


@pytest.fixture
def in_memory() -> Iterator[str]:
    with fsspec.open("memory://data/rows.parquet", "wb") as file:
        pq.write_table(table(0, 10), file, row_group_size=4)
    yield "memory://data/rows.parquet"
    fsspec.filesystem("memory").rm("/data", recursive=True)


def test_uris_of_pyarrow_and_of_fsspec(files: list[str], in_memory: str) -> None:
    rows = Rows([f"file://{files[1]}", in_memory, files[0]], columns=["number"], cache_bytes=0)
    assert numbers(rows) == [*range(10, 25), *range(10), *range(10)]
    assert rows.place(16) == f"{in_memory}, row 1"
    with pytest.raises(ValueError, match="no such data file: memory://data/other.parquet"):
        Rows("memory://data/other.parquet", columns=["number"])
    fsspec.filesystem("memory").rm("/data/rows.parquet")
    with pytest.raises(ValueError, match="no such data file: memory://data/rows.parquet; the run reads it until"):
        rows[20]
    with fsspec.open("memory://data/rows.parquet", "wb") as file:
        pq.write_table(table(0, 10), file)


def test_uris_that_nothing_opens() -> None:
    with pytest.raises(ValueError, match=r"nosuch://x/y.parquet cannot be opened: .*nosuch.*check the name"):
        Rows("nosuch://x/y.parquet", columns=["number"])
    with pytest.raises(ValueError, match=r"hdfs://127.0.0.1:1/y.parquet cannot be opened: .*CLASSPATH="):
        Rows("hdfs://127.0.0.1:1/y.parquet", columns=["number"])


READ_ALL = """
import re, sys
from pathlib import Path
from megarl.data.order import Order, Position
from megarl.data.rows import Rows

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10

def opened(file, cache_megabytes):
    return Rows(file, columns=["prompt"], cache_bytes=cache_megabytes << 20, part_bytes=8 << 20)

def epoch(rows):
    order = Order(rows.chunks, batch_size=64, shuffle=True, seed=1, window_bytes=8 << 20)
    position, seen = Position(), set()
    assert all(len(row["prompt"]) == 5000 for row in rows)
    for _ in range(order.steps_per_epoch):
        taken, position = order.take(position)
        seen |= {rows[index]["prompt"][:8] for index in taken}
    return len(seen)

small, large = sys.argv[1:]
epoch(opened(small, 16))
before = peak()
num_seen = epoch(opened(large, 16))
bounded = peak() - before
rows = opened(large, 4096)
for index in range(0, len(rows), 100):
    rows[index]
print(num_seen, bounded, peak() - before)
"""


@pytest.mark.parametrize("rows_per_group", [128, 1 << 20])
def test_memory_is_bounded_by_cache_not_file(tmp_path: Path, rows_per_group: int) -> None:
    def write_bulk(name: str, num_rows: int) -> Path:
        prompts = [f"{row:08}" + "x" * 4992 for row in range(num_rows)]
        path = tmp_path / name
        pq.write_table(pa.table({"prompt": prompts}), path, row_group_size=rows_per_group, compression="none")
        return path

    small, large = write_bulk("small.parquet", 256), write_bulk("large.parquet", 40_960)
    megabytes = large.stat().st_size >> 20
    assert megabytes > 190
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(small), str(large)], capture_output=True, text=True, check=True
    )
    num_seen, bounded, unbounded = map(int, done.stdout.split())
    assert num_seen == 40_960
    assert bounded < megabytes * 0.6
    assert unbounded > megabytes * 0.9  # the measure notices a file that is held in memory
