"""A value that cannot be read is named with its file, its row and its column."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.columns import BY_SOURCE, PromptColumns
from megarl.data.config import DataSection
from megarl.data.rows import MAX_DEPTH
from megarl.platform.errors import UserError

ROW: dict[str, Any] = {"prompt": "1", "data_source": "gsm8k", "reward_model": {"ground_truth": "1"}}


def nested(depth: int, *, as_list: bool = False) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if as_list else {"a": value}
    return value


def lines(path: Path, *texts: bytes) -> Path:
    path.write_bytes(b"".join(text + b"\n" for text in (json.dumps(ROW).encode(), *texts)))
    return path


def with_info(value: Any) -> bytes:
    return json.dumps(ROW | {"extra_info": value}).encode()


def times(path: Path, unit: str, value: int) -> Path:
    info = pa.StructArray.from_arrays([pa.array([0, value], pa.timestamp(unit))], ["t"])
    columns = {name: [value] * 2 for name, value in ROW.items()}
    pq.write_table(pa.table({**columns, "extra_info": info}), path)
    return path


DAMAGES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nested": (
        lambda path: lines(path / "a.jsonl", with_info(nested(101))),
        "line 2, column extra_info: the value is nested more than 100 deep",
    ),
    "lists": (
        lambda path: lines(path / "a.jsonl", with_info(nested(900, as_list=True))),
        "line 2, column extra_info: the value is nested more than 100 deep",
    ),
    "text of JSON": (
        lambda path: lines(path / "a.jsonl", with_info('{"a":' * 900 + "1" + "}" * 900)),
        "line 2, column extra_info: ",
    ),
    "a line of NULs": (
        lambda path: lines(path / "a.jsonl", b"\0" * 4096, json.dumps(ROW).encode()),
        "line 2: a record must be one line of JSON in UTF-8",
    ),
    "seconds beyond a year": (
        lambda path: times(path / "a.parquet", "s", 10**14),
        "row 1, column extra_info: the value cannot be read: ",
    ),
    "a time beyond the last year": (
        lambda path: times(path / "a.parquet", "us", 2**62),
        "row 1, column extra_info: the value cannot be read: date value out of range",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    make, said = DAMAGES[name]
    file = make(tmp_path)
    columns = PromptColumns(section=DataSection(train_files=str(file)), needs=BY_SOURCE)
    with pytest.raises(UserError) as caught:
        rows = columns.open(str(file))
        for number, row in enumerate(rows):
            for fault in columns.faults(row):
                raise UserError(f"{rows.place(number)}, column {fault}")
    assert str(caught.value).startswith(f"{file}, {said}")


def test_ordinary_nesting_and_times_are_read(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", with_info(nested(MAX_DEPTH - 1)), b" \t", with_info(nested(3)))
    columns = PromptColumns(section=DataSection(train_files=str(file)), needs=BY_SOURCE)
    assert [list(columns.faults(row)) for row in columns.open(str(file))] == [[]] * 3
    assert len(list(columns.open(str(times(tmp_path / "a.parquet", "us", 10**15))))) == 2
