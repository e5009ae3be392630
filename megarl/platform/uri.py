"""File systems by the name a user gave: a local path, or a URI of anything that pyarrow or fsspec opens."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from fsspec import available_protocols, get_filesystem_class
from fsspec.core import url_to_fs
from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

from megarl.platform.secrets import redact

ARROW_SCHEMES = ("abfs", "abfss", "file", "gcs", "gs", "hdfs", "s3", "viewfs")
"""What pyarrow opens itself; all other schemes are fsspec's."""

_HADOOP = "libhdfs is found through JAVA_HOME, HADOOP_HOME and CLASSPATH=$(hadoop classpath --glob)"
REMEDIES = MappingProxyType(
    {
        "s3": "keys and region come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION or from ~/.aws, a "
        "server other than Amazon's from AWS_ENDPOINT_URL",
        "hdfs": _HADOOP,
        "viewfs": _HADOOP,
    }
)

WAITS_S = (1.0, 4.0, 16.0)
"""Seconds between the tries of one thing."""

T = TypeVar("T")


def is_uri(name: str) -> bool:
    """Whether a user's name of a file or a directory is a URI, and no path."""
    return "://" in name


def local_path(name: str) -> Path | None:
    """The path of what lies on this machine, as a path or a `file://` URI; None for any other URI."""
    if not is_uri(name):
        return Path(name).expanduser()
    return Path(open_filesystem(name)[1]) if name.startswith("file://") else None


def persist(work: Callable[[], T], waits: Sequence[float] = WAITS_S) -> T:
    """Do what may fail, again after each of `waits` seconds. Raises what the last try raised."""
    for wait in waits:
        try:
            return work()
        except Exception:  # each file system has errors of its own
            time.sleep(wait)
    return work()


def open_filesystem(name: str) -> tuple[Any, str]:
    """The `pyarrow.fs.FileSystem` of a path or URI, and the path in it; no file is read yet.

    Raises:
        ValueError: there is none, or it is out of reach.
    """
    scheme, separator, _ = name.partition("://")
    if not separator:
        return LocalFileSystem(), name
    try:
        if scheme in ARROW_SCHEMES:
            filesystem, path = FileSystem.from_uri(name)
        else:
            opened, path = url_to_fs(name)
            filesystem = PyFileSystem(FSSpecHandler(opened))
    except Exception as error:  # each filesystem has errors of its own, and fsspec says by ImportError what to install
        raise out_of_reach(name, error) from error
    return filesystem, path


def out_of_reach(name: str, error: Exception) -> ValueError:
    """What to tell a user of `error`, which came of opening `name`; without secrets."""
    remedy = REMEDIES.get(name.partition("://")[0], "check the name, and that this machine may read it")
    reason = str(error).partition("\n")[0]
    return ValueError(redact(f"{name} cannot be opened: {reason} ({remedy})"))


def why_unopened(name: str) -> str | None:
    """Why nothing that is installed opens a URI, or one of a chain (`zip://a::s3://b`); None where something does.

    No server is asked.
    """
    schemes = [part.partition("://")[0] for part in name.split("::") if "://" in part]
    for scheme in schemes:
        if scheme in ARROW_SCHEMES:
            continue
        if scheme not in available_protocols():
            return f"{scheme}:// is no scheme that pyarrow or fsspec opens"
        try:
            get_filesystem_class(scheme)
        except ImportError as error:  # it says which package
            return f"{scheme}:// lacks a package: {str(error).partition(chr(10))[0]}"
    return None
