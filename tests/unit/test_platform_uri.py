"""Users write URIs as they write paths, with blanks and letters of any script, or encoded."""

from pathlib import Path

import pytest
from pyarrow.fs import S3FileSystem

from megarl.platform.uri import local_path, open_filesystem


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("file:///data/train.parquet", "/data/train.parquet"),
        ("file:///my data/the train file.parquet", "/my data/the train file.parquet"),
        ("file:///my%20data/train.parquet", "/my data/train.parquet"),
        ("file:///データ/über.parquet", "/データ/über.parquet"),
        ('file:///a"b/<c>/{d}/x^y|z`.parquet', '/a"b/<c>/{d}/x^y|z`.parquet'),
    ],
)
def test_a_uri_of_a_local_file_names_its_path(written: str, path: str) -> None:
    assert local_path(written) == Path(path)


def test_a_key_of_a_bucket_may_have_blanks() -> None:
    filesystem, path = open_filesystem("s3://bucket/my data/ü.parquet?region=eu-west-1")
    assert isinstance(filesystem, S3FileSystem)
    assert path == "bucket/my data/ü.parquet"
