"""File systems of local paths and of URIs that pyarrow or fsspec opens."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import quote

from fsspec import available_protocols, get_filesystem_class
from fsspec.core import url_to_fs
from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

from megarl.errors import UserError
from megarl.platform.secrets import redact

ARROW_SCHEMES = ("abfs", "abfss", "file", "gcs", "gs", "hdfs", "s3", "viewfs")
"""The schemes that pyarrow opens; fsspec opens all others."""

_MEANING = "%:/?#[]@!$&'()*+,;=-._~"  # what has a meaning in a URI; users also write blanks and letters of any script
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
"""Seconds between attempts."""

T = TypeVar("T")


def is_uri(name: str) -> bool:
    """Return whether the name of a file or a directory is a URI, not a path."""
    return "://" in name


def local_path(name: str) -> Path | None:
    """Return the local path of a path or a `file://` URI; None for any other URI."""
    if not is_uri(name):
        return Path(name).expanduser()
    return Path(open_filesystem(name)[1]) if name.startswith("file://") else None


def persist(work: Callable[[], T], waits: Sequence[float] = WAITS_S) -> T:
    """Call `work`, and again after each of `waits` seconds if it fails. Raise the error of the last attempt."""
    for wait in waits:
        try:
            return work()
        except Exception:  # each file system has errors of its own
            time.sleep(wait)
    return work()


def open_filesystem(name: str) -> tuple[Any, str]:
    """Return the `pyarrow.fs.FileSystem` of a path or URI, and the path in it; read no file yet.

    Raises:
        UserError: nothing opens the scheme, or the file system cannot be reached.
    """
    scheme, separator, _ = name.partition("://")
    if not separator:
        return LocalFileSystem(), name
    try:
        if scheme in ARROW_SCHEMES:
            filesystem, path = FileSystem.from_uri(quote(name, safe=_MEANING))
        else:
            opened, path = url_to_fs(name)
            filesystem = PyFileSystem(FSSpecHandler(opened))
    except Exception as error:  # errors differ by file system; an ImportError of fsspec names the missing package
        raise out_of_reach(name, error) from error
    return filesystem, path


def out_of_reach(name: str, error: Exception) -> UserError:
    """Return the error for a user whose `name` could not be opened because of `error`; without secrets."""
    remedy = REMEDIES.get(name.partition("://")[0], "check the name, and that this machine may read it")
    reason = str(error).partition("\n")[0]
    return UserError(redact(f"{name} cannot be opened: {reason} ({remedy})"))


def why_unopened(name: str) -> str | None:
    """Return why nothing installed opens a URI, or a URI of a chain (`zip://a::s3://b`); None if something opens it.

    No server is contacted.
    """
    schemes = [part.partition("://")[0] for part in name.split("::") if "://" in part]
    for scheme in schemes:
        if scheme in ARROW_SCHEMES:
            continue
        if scheme not in available_protocols():
            return f"neither pyarrow nor fsspec opens {scheme}://"
        try:
            get_filesystem_class(scheme)
        except ImportError as error:  # its message names the package
            return f"{scheme}:// lacks a package: {str(error).partition(chr(10))[0]}"
    return None
