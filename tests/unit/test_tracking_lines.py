"""Records on a disk that is full, read-only or limited for a while, and later not."""

import json
import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.tracking import lines
from megarl.tracking.jsonl import Jsonl, read_jsonl
from megarl.tracking.lines import Lines
from megarl.tracking.outbox import Outbox
from tests.disks import Disk, small_disk

LONG = "x" * 5000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        yield disk


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read_jsonl(path)]


def test_metrics_and_tables_follow_when_a_full_disk_has_room_again(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Jsonl(disk.path)
    tracker.log({"loss": 1.0}, step=1)
    disk.fill()
    for step in (2, 3):
        tracker.log({"loss": 1.0, LONG: 1.0}, step=step)
        tracker.log_table("val/generations", [{"text": LONG}, {"text": "b"}], step=step)
    assert steps_of(disk.path / "metrics.jsonl") == [1]  # and no half line
    assert caplog.text.count("metrics.jsonl takes no more lines") == 1
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
    assert "is written again: 2 lines of a while ago, 3 lost" in caplog.text


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


def test_a_text_with_separators_of_lines_is_one_line(tmp_path: Path) -> None:
    Jsonl(tmp_path).log_table("t", [{"text": "a\u2028b\x85c\x1cd"}], step=1)
    assert read_jsonl(tmp_path / "t.jsonl") == [{"step": 1, "text": "a\u2028b\x85c\x1cd"}]


@pytest.mark.parametrize(
    "left", [bytes(4096), bytes(4096) + b"\n", b'{"step": 3, "lo\n', b'{"step": 3, "loss": "\xc3"}\n', b'{"step": 3}']
)
def test_what_a_power_cut_left_ends_a_file_and_stops_no_resume(
    tmp_path: Path, left: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = Jsonl(tmp_path)
    for step in (1, 2):
        first.log({"loss": 1.0}, step=step)
    path = tmp_path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(left)
    assert steps_of(path) == [1, 2]
    if left.endswith(b"\n"):
        first.log({"loss": 1.0}, step=4)  # by a job that did not notice
    again = Jsonl(tmp_path, resume_step=4, resume_metrics={"loss": 2.0})
    again.log({"loss": 2.0}, step=5)
    assert steps_of(path) == [1, 2, 4, 5]
    assert caplog.text.count("metrics.jsonl had a line that a crash left spoilt, and ends before it now") == 1
    caplog.clear()
    Jsonl(tmp_path, resume_step=5)
    assert not caplog.records


def drained(outbox: Outbox) -> list[Any]:
    found = []
    while record := outbox.first():
        found.append(record["number"])
        outbox.drop_first()
    return found


def test_an_outbox_hands_out_in_order_and_ends_empty(tmp_path: Path) -> None:
    path = tmp_path / "outbox.jsonl"
    outbox = Outbox(path)
    for number in range(3):
        outbox.put({"number": number})
    assert outbox.first() == {"number": 0}
    outbox.drop_first()
    with path.open("a") as file:
        file.write('{"number": 3\0\0\n{"number')  # killed in the middle of a line, by a power cut
    again = Outbox(path)
    again.put({"number": 4})
    assert drained(again) == [0, 1, 2, 4]  # the first too: nobody knows that it was sent
    assert path.read_bytes() == b""
    assert again.close() == 0


def test_an_outbox_on_a_full_disk_hands_out_from_memory(disk: Disk) -> None:
    outbox = Outbox(disk.path / "outbox.jsonl")
    outbox.put({"number": 0})
    disk.fill()
    for number in (1, 2):
        outbox.put({"number": number, "text": LONG})
    assert drained(outbox) == [0, 1, 2]
    outbox.put({"number": 3, "text": LONG})
    assert outbox.close() == 1
    disk.clear()
    assert outbox.close() == 1
    assert [json.loads(line)["number"] for line in outbox.path.open()] == [3]
