"""Records on a disk that is full, read-only or limited for some time."""

import logging
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.platform.deadline import computing_at_most
from megarl.tracking import lines
from megarl.tracking.jsonl import Jsonl, Unread, read_jsonl
from megarl.tracking.lines import Lines
from tests.support.disks import Disk, small_disk

LONG = "x" * 5000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        yield disk


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read_jsonl(path)]


def test_metrics_and_tables_follow_once_disk_has_space(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Jsonl(disk.path)
    tracker.log({"loss": 1.0}, step=1)
    disk.fill()
    for step in (2, 3):
        tracker.log({"loss": 1.0, LONG: 1.0}, step=step)
        tracker.log_table("val/generations", [{"text": LONG}, {"text": "b"}], step=step)
    assert steps_of(disk.path / "metrics.jsonl") == [1]  # and no half line
    assert caplog.text.count("metrics.jsonl accepts no more lines") == 1
    assert "No space left on device; free space there" in caplog.text
    disk.clear()
    tracker.log({"loss": 1.0}, step=4)
    assert steps_of(disk.path / "metrics.jsonl") == [1, 2, 3, 4]
    tracker.close()
    assert steps_of(disk.path / "val_generations.jsonl") == [2, 2, 3, 3]


def test_a_disk_that_becomes_read_only(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Jsonl(disk.path)
    with disk.read_only():
        tracker.log({"loss": 1.0}, step=1)
        assert "Read-only file system; have it mounted for writing" in caplog.text
        assert caplog.records[-1].levelno == logging.WARNING
    tracker.close()
    assert steps_of(disk.path / "metrics.jsonl") == [1]


def test_what_memory_cannot_hold_either_is_counted(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lines, "MAX_WAITING_BYTES", 3 * len(LONG))
    file = Lines(disk.path / "file.jsonl")
    disk.fill()
    for step in range(5):
        file.append([{"step": step, "text": LONG}])
    file.close()
    assert "file.jsonl lacks the last 5 lines" in caplog.text
    disk.clear()
    file.close()
    assert steps_of(file.path) == [0, 1]
    assert "accepts lines again: 2 waiting lines are written, 3 are lost" in caplog.text


def test_many_lines_wait_in_linear_time(disk: Disk) -> None:
    file = Lines(disk.path / "file.jsonl")
    disk.fill()
    with computing_at_most(3.0):
        file.append({"step": step} for step in range(30_000))
    disk.clear()
    file.close()
    assert len(steps_of(file.path)) == 30_000


def test_a_file_that_may_not_grow_further(tmp_path: Path) -> None:
    file = Lines(tmp_path / "file.jsonl")
    file.append([{"step": 1}])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        file.append([{"step": 2, "text": LONG}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.path.read_text() == '{"step": 1}\n'
    file.close()
    assert steps_of(file.path) == [1, 2]


def test_text_with_line_separators_is_one_line(tmp_path: Path) -> None:
    Jsonl(tmp_path).log_table("t", [{"text": "a\u2028b\x85c\x1cd"}], step=1)
    assert read_jsonl(tmp_path / "t.jsonl") == [{"step": 1, "text": "a\u2028b\x85c\x1cd"}]


DAMAGED = [
    bytes(4096),
    b'{"step": 3, "lo',
    b'{"step": 3, "loss": "\xc3"}',
    *(b"5", b"{}", b"null", b"[]", b'"step"', b'{"step": "3"}', b'{"step": null}', b'{"step": true}', b'{"step": 1.0}'),
    *(b'{"step": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"step":' * 100_000, b"\xff\xfe", b""),
]


@pytest.mark.parametrize("left", [*DAMAGED, b'{"step": 3}'], ids=range(len(DAMAGED) + 1))
def test_damaged_last_lines_are_removed_on_resume(
    tmp_path: Path, left: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_steps(tmp_path, 1, 2)
    with path.open("ab") as file:
        file.write(left if left == b'{"step": 3}' else left + b"\n")
    assert steps_of(path) == [1, 2]
    again = Jsonl(tmp_path, resume_step=3, resume_metrics={"loss": 2.0})
    again.log({"loss": 2.0}, step=4)
    assert steps_of(path) == [1, 2, 3, 4]
    assert caplog.text.count("metrics.jsonl had 1 damaged lines at its end, which are removed") == 1
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    caplog.clear()
    Jsonl(tmp_path, resume_step=4)
    assert not caplog.records


def write_steps(directory: Path, *steps: int) -> Path:
    tracker = Jsonl(directory)
    for step in steps:
        tracker.log({"loss": 1.0}, step=step)
    return directory / "metrics.jsonl"


@pytest.mark.parametrize("spoilt", [*DAMAGED, b'{"step": 99}'], ids=range(len(DAMAGED) + 1))
def test_damaged_line_costs_no_other_line_or_data(
    tmp_path: Path, spoilt: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_steps(tmp_path, *range(1, 101))
    lines = path.read_bytes().splitlines()
    lines[1] = spoilt
    path.write_bytes(was := b"\n".join(lines) + b"\n")
    again = Jsonl(tmp_path, resume_step=90, resume_metrics={"loss": 2.0})
    again.log({"loss": 2.0}, step=91)
    assert steps_of(path) == [1, *range(3, 92)]
    [aside] = tmp_path.glob("metrics.jsonl.set_aside-*")
    assert aside.read_bytes() == was
    assert f"the old file is set aside as {aside.name}" in caplog.text
    assert path.read_bytes().splitlines()[:89] == [lines[0], *lines[2:90]]


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_costs_two_lines_at_most(tmp_path: Path, place: float, bit: int) -> None:
    """Return two positions if the damage joins two lines."""
    directory = tmp_path / uuid4().hex
    directory.mkdir()
    path = write_steps(directory, *range(1, 21))
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    Jsonl(directory, resume_step=20)
    assert len(set(steps_of(path)) & set(range(1, 21))) >= 18
    kept = set(path.read_bytes().splitlines(keepends=True))
    lost = [line for line in bytes(content).splitlines(keepends=True) if line not in kept]
    asides = [file.read_bytes() for file in directory.glob("metrics.jsonl.set_aside-*")]
    assert asides == [content] or bytes(content).endswith(
        b"".join(lost)
    )  # only removed text at the end is not set aside


@pytest.mark.parametrize("put", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)])
def test_irregular_metrics_file_is_set_aside(
    tmp_path: Path, put: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "metrics.jsonl")
    Jsonl(tmp_path, resume_step=2, resume_metrics={"loss": 2.0})
    assert steps_of(tmp_path / "metrics.jsonl") == [2]
    assert "metrics.jsonl is no regular file: it is set aside as metrics.jsonl.set_aside-" in caplog.text


def taken(unread: Unread) -> list[int]:
    return [row["step"] for rows in unread.metrics() for row in rows]


def test_reader_gets_each_valid_line_once_in_order(tmp_path: Path) -> None:
    records = Jsonl(tmp_path)
    unread = Unread(records)
    for step in range(250):
        records.log({"loss": 1.0}, step=step)
    first = next(unread.metrics())  # is not taken, because nothing shows that it was sent
    assert taken(unread) == list(range(250))
    assert [row["step"] for row in first] == list(range(len(first)))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 250\0\0\n')
    for step in (251, 252):
        records.log({"loss": 1.0}, step=step)
    assert taken(unread) == [251, 252]
    assert taken(unread) == []
    assert taken(Unread(records)) == [*range(250), 251, 252]


def test_reader_gets_table_rows_of_step_together(tmp_path: Path) -> None:
    records = Jsonl(tmp_path)
    unread = Unread(records)
    records.log_table("val/generations", [{"text": "a"}, {"text": "b"}], step=1)
    records.log_table("own", [{"text": "c"}], step=1)
    records.log_table("val/generations", [{"text": "d"}], step=2)
    found = [(name, rows[0]["step"], [row["text"] for row in rows]) for name, rows in unread.tables()]
    assert found == [("val/generations", 1, ["a", "b"]), ("val/generations", 2, ["d"]), ("own", 1, ["c"])]
    records.log_table("own", [{"text": "e"}], step=2)
    assert [(name, rows) for name, rows in unread.tables()] == [("own", [{"step": 2, "text": "e"}])]


def test_reader_gets_lines_refused_by_full_disk(disk: Disk) -> None:
    records = Jsonl(disk.path)
    unread = Unread(records)
    records.log({"loss": 1.0}, step=0)
    disk.fill()
    for step in (1, 2):
        records.log({LONG: 1.0}, step=step)
    assert taken(unread) == [0, 1, 2]
    records.log({LONG: 1.0}, step=3)
    disk.clear()
    records.log({"loss": 1.0}, step=4)
    assert taken(unread) == [3, 4]
    assert steps_of(disk.path / "metrics.jsonl") == [0, 1, 2, 3, 4]


def test_reader_of_truncated_file_restarts(tmp_path: Path) -> None:
    records = Jsonl(tmp_path)
    unread = Unread(records)
    for step in (1, 2, 3):
        records.log({"loss": 1.0}, step=step)
    assert taken(unread) == [1, 2, 3]
    (tmp_path / "metrics.jsonl").unlink()
    records.log({"loss": 1.0}, step=4)
    assert taken(unread) == [4]
