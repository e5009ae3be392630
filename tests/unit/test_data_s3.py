"""Data on S3, from a real server on this machine."""

from collections.abc import Iterator

import pyarrow
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from megarl.data.rows import Rows
from tests.support.s3 import s3_server

BUCKET = "prompts"


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server(BUCKET) as environ:
        yield environ


@pytest.fixture
def endpoint(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    for key, value in server.items():
        monkeypatch.setenv(key, value)
    return server["AWS_ENDPOINT_URL"].removeprefix("http://")


def put(endpoint: str, name: str, start: int, stop: int) -> str:
    """Write numbers as an object of the bucket."""
    filesystem = pyarrow.fs.S3FileSystem(endpoint_override=endpoint, scheme="http")
    numbers = pyarrow.table({"number": list(range(start, stop)), "bulk": ["x" * 100] * (stop - start)})
    pq.write_table(numbers, f"{BUCKET}/{name}", filesystem=filesystem, row_group_size=10)
    return f"s3://{BUCKET}/{name}"


def test_rows_are_read_from_server_of_environment(endpoint: str) -> None:
    files = [put(endpoint, "deep/a.parquet", 0, 25), put(endpoint, "b.parquet", 25, 40)]
    rows = Rows(files, columns=["number"])
    assert [row["number"] for row in rows] == list(range(40))
    assert [rows[index]["number"] for index in (33, 0, 24, 25)] == [33, 0, 24, 25]
    assert rows.place(33) == f"s3://{BUCKET}/b.parquet, row 8"


def test_a_server_named_in_the_uri(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = put(endpoint, "a.parquet", 0, 5)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert len(Rows(f"{file}?scheme=http&endpoint_override={endpoint}", columns=["number"])) == 5


def test_objects_that_are_not_there(endpoint: str) -> None:
    put(endpoint, "a.parquet", 0, 25)
    with pytest.raises(ValueError, match=f"no such data file: s3://{BUCKET}/other.parquet"):
        Rows(f"s3://{BUCKET}/other.parquet", columns=["number"])


def test_a_server_that_is_gone(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"s3://.*a.parquet cannot be opened: .*AWS_ENDPOINT_URL"):
        Rows(f"s3://{BUCKET}/a.parquet", columns=["number"])
