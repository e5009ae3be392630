"""A real S3 server on this machine, for as long as a block lasts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pyarrow.fs
import pytest


@contextmanager
def s3_server(*buckets: str) -> Iterator[dict[str, str]]:
    """Yield an environment in which `s3://` reaches a server with these buckets; skip the test without moto."""
    moto = pytest.importorskip("moto.server", reason="moto, a local S3 server, is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        environ = {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }
        for bucket in buckets:
            _client(environ).create_dir(bucket)
        yield environ
    finally:
        server.stop()


class Objects:
    """The objects under a path (BUCKET/PREFIX) of the server of `environ`."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        self._path, self._client = path, _client(environ)

    def names(self) -> list[str]:
        """The objects and prefixes right below."""
        return sorted(info.base_name for info in self._client.get_file_info(pyarrow.fs.FileSelector(self._path)))

    def sizes(self, prefix: str) -> dict[str, int]:
        """The objects anywhere below a prefix, and their bytes."""
        below = f"{self._path}/{prefix}"
        found = self._client.get_file_info(pyarrow.fs.FileSelector(below, recursive=True))
        return {info.path.removeprefix(f"{below}/"): info.size for info in found if info.is_file}

    def put(self, name: str, content: bytes) -> None:
        """Write an object."""
        with self._client.open_output_stream(f"{self._path}/{name}") as file:
            file.write(content)

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._client.delete_file(f"{self._path}/{name}")


def _client(environ: Mapping[str, str]) -> pyarrow.fs.S3FileSystem:
    return pyarrow.fs.S3FileSystem(
        access_key=environ["AWS_ACCESS_KEY_ID"],
        secret_key=environ["AWS_SECRET_ACCESS_KEY"],
        region=environ["AWS_REGION"],
        endpoint_override=environ["AWS_ENDPOINT_URL"],
        allow_bucket_creation=True,
    )
