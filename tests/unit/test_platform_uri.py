"""The text after `scheme://` is the literal name of an object, and options are told apart by their names."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.fs import FileSystem, FileType, S3FileSystem

from megarl.platform.errors import UserError
from megarl.platform.remote import RemoteDirectory, split_uri
from megarl.platform.uri import local_path, open_filesystem, split_options
from tests.support.s3 import s3_server

PRINTABLE = st.characters(categories=["L", "M", "N", "P", "S", "Zs"], exclude_characters="/")
NAMES = st.text(PRINTABLE, min_size=1, max_size=40)
TRICKY = st.text(st.sampled_from("#?[]%&=+:@;'\\\"2aF0 *{}|^`~"), min_size=1, max_size=12)
FILES = st.one_of(NAMES, TRICKY).filter(lambda name: name not in {".", ".."} and len(name.encode()) < 250)


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("file:///data/train.parquet", "/data/train.parquet"),
        ("file:///my data/the train file.parquet", "/my data/the train file.parquet"),
        ("file:///my%20data/train.parquet", "/my%20data/train.parquet"),
        ("file://localhost/data/run#2", "/data/run#2"),
        ("file:///tmp/run?2", "/tmp/run?2"),
        ("file:///tmp/a::b[1]", "/tmp/a::b[1]"),
        ('file:///a"b/<c>/{d}/x^y|z`.parquet', '/a"b/<c>/{d}/x^y|z`.parquet'),
    ],
)
def test_local_file_uri_names_its_path(written: str, path: str) -> None:
    assert local_path(written) == Path(path)


@pytest.mark.parametrize("written", ["file://", "file://data/train.parquet", "file://~/train.parquet"])
def test_file_uri_without_root_is_refused(written: str) -> None:
    with pytest.raises(UserError, match="file:///directory/file"):
        local_path(written)


@given(FILES)
@settings(deadline=None)
def test_file_uri_writes_to_its_path(name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        filesystem, path = open_filesystem(f"file://{directory}/{name}")
        with filesystem.open_output_stream(path) as file:
            file.write(name.encode())
        assert [file.name for file in Path(directory).iterdir()] == [name]
        assert Path(directory, name).read_bytes() == name.encode()


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3FileSystem]:
    with s3_server("bucket") as environ, pytest.MonkeyPatch.context() as patch:
        for key, value in environ.items():
            patch.setenv(key, value)
        yield FileSystem.from_uri("s3://bucket")[0]


@given(FILES)
@settings(deadline=None, max_examples=20)
def test_s3_uri_writes_to_its_key(bucket: S3FileSystem, name: str) -> None:
    for options in ("", "?region=us-east-1"):
        uri = f"s3://bucket/keys/{name}{options}"
        filesystem, path = open_filesystem(uri)
        assert path == f"bucket/keys/{name}"
        with filesystem.open_output_stream(path) as file:
            file.write(options.encode())
        assert bucket.get_file_info(f"bucket/keys/{name}").type == FileType.File
        assert split_uri(uri) == (f"s3://bucket/keys{options}", name)
        assert RemoteDirectory(f"s3://bucket/keys{options}").read(name) == options.encode()


@given(FILES)
@settings(deadline=None)
def test_names_of_other_stores_are_whole(name: str) -> None:
    if split_options(f"abfs://a?{name}")[1]:
        return
    places = [
        ("abfss://files@account.dfs.core.windows.net/", "?credential_kind=anonymous", "files/"),
        ("abfs://files@account.dfs.core.windows.net/", "?sv=2025&sig=a%2Bb", "files/"),
        ("gs://anonymous@bucket/", "?retry_limit_seconds=1", "bucket/"),
        ("memory://bucket/", "", "/bucket/"),
    ]
    for base, options, inside in places:
        assert open_filesystem(f"{base}{name}{options}")[1] == inside + name


@pytest.mark.parametrize(
    ("uri", "options"),
    [
        ("s3://b/a?region=x&scheme=http", "?region=x&scheme=http"),
        ("s3://b/a?b=c?region=x", "?region=x"),
        ("s3://b/a?b=c", ""),
        ("s3://b/a?", ""),
        ("s3://b/a?region=x&b=c", ""),
        ("gs://b/a?region=x", ""),
        (
            "hdfs://n/a?user=ann&dfs.client.use-datanode-hostname=true",
            "?user=ann&dfs.client.use-datanode-hostname=true",
        ),
        ("hdfs://n/a?2", ""),
        ("abfs://c@a/x?sv=1&sig=b%3D", "?sv=1&sig=b%3D"),
        ("https://host/a?b=c?d", "?b=c?d"),
        ("memory://a?region=x", ""),
        ("file:///a?scheme=x", ""),
    ],
)
def test_options_are_what_the_file_system_knows(uri: str, options: str) -> None:
    assert split_options(uri) == (uri.removesuffix(options), options)


def test_a_tilde_may_be_of_no_user() -> None:
    assert local_path("~no-such-user/x") == Path("~no-such-user/x")
    assert local_path("~/x") == Path.home() / "x"


def test_a_key_of_a_bucket_may_have_blanks() -> None:
    filesystem, path = open_filesystem("s3://bucket/my data/ü.parquet?region=eu-west-1")
    assert isinstance(filesystem, S3FileSystem)
    assert path == "bucket/my data/ü.parquet"
