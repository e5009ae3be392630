"""File systems of local paths and of URIs that pyarrow or fsspec opens."""

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import quote

from fsspec import available_protocols, get_filesystem_class
from fsspec.core import url_to_fs
from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

from megarl.platform.errors import UserError
from megarl.platform.hub import is_hub_model
from megarl.platform.secrets import redact

ARROW_SCHEMES = ("abfs", "abfss", "file", "gcs", "gs", "hdfs", "s3", "viewfs")
"""The schemes that pyarrow opens; fsspec opens all others."""

_AUTHORITY = "%:@[]!$&'()*+,;=-._~"  # what has a meaning between `scheme://` and the first slash
_GCS = r"scheme|endpoint_override|retry_limit_seconds|project_id"
_HDFS = r"user|replication|buffer_size|default_block_size|kerb_ticket|[a-z]+(?:\.[\w-]+)+"
_S3 = (
    r"region|scheme|endpoint_override|allow_bucket_creation|allow_bucket_deletion|allow_delayed_open|"
    r"tls_ca_file_path|tls_ca_dir_path|tls_verify_certificates|smart_defaults"
)
_AZURE = (
    r"blob_storage_authority|dfs_storage_authority|enable_tls|credential_kind|tenant_id|client_id|client_secret|"
    r"background_writes|s[vspert]|srt|spr|sig|skoid|sktid|skt|ske|sks|skv|sip|si|sdd|saoid|suoid|scid"  # a SAS token
)
_OPTIONS = MappingProxyType(
    {"abfs": _AZURE, "abfss": _AZURE, "gcs": _GCS, "gs": _GCS, "hdfs": _HDFS, "s3": _S3, "viewfs": _HDFS}
)
"""The names of options, by scheme: what follows the last `?` is a name of the object if its file system lacks them."""
_WITH_QUERY = ("http", "https")
"""The schemes whose `?` always begins a query."""
_HADOOP = "libhdfs is found through JAVA_HOME, HADOOP_HOME and CLASSPATH=$(hadoop classpath --glob)"
REMEDIES = MappingProxyType(
    {
        "s3": "keys and region come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION or from ~/.aws, a "
        "server other than Amazon's from AWS_ENDPOINT_URL",
        "hdfs": _HADOOP,
        "hf": "what is private or gated needs HF_TOKEN; without a network, download it on another machine and name its "
        "path",
        "viewfs": _HADOOP,
    }
)

WAITS_S = (1.0, 4.0, 16.0)
"""Seconds between attempts."""

T = TypeVar("T")


def is_uri(name: str) -> bool:
    """Return whether the name of a file or a directory is a URI, not a path or a model of the Hugging Face hub."""
    return "://" in name and not is_hub_model(name)


def local_path(name: str) -> Path | None:
    """Return the local path of a path or a `file://` URI, for a Hugging Face id a missing path; None for other URIs."""
    if not is_uri(name):
        return Path(os.path.expanduser(name))  # noqa: PTH111 - a Path raises if there is no such user
    return Path(open_filesystem(name)[1]) if name.startswith("file://") else None


def split_options(uri: str) -> tuple[str, str]:
    """Return the URI that names the object, and its options with their `?`; an empty text if it has none.

    Every other `?` belongs to the name of the object.
    """
    scheme = uri.partition("://")[0]
    if scheme in _WITH_QUERY:
        place, mark, query = uri.partition("?")
        return place, mark + query
    place, mark, query = uri.rpartition("?")
    known = rf"(?:{_OPTIONS.get(scheme, '(?!)')})=[^&]*"
    if mark and all(re.fullmatch(known, option) for option in query.split("&")):
        return place, mark + query
    return uri, ""


def persist(work: Callable[[], T], waits: Sequence[float] = WAITS_S) -> T:
    """Call `work`, and again after each of `waits` seconds if it fails. Raise the error of the last attempt."""
    for wait in waits:
        try:
            return work()
        except Exception:  # each file system has errors of its own
            time.sleep(wait)
    return work()


def open_filesystem(name: str) -> tuple[FileSystem, str]:
    """Return the `pyarrow.fs.FileSystem` of a path or URI, and the path in it; read no file yet.

    The path of a URI is taken as it is written: no character in it is a fragment, a query or a code.

    Raises:
        UserError: nothing opens the scheme, or the file system cannot be reached.
    """
    scheme, separator, _ = name.partition("://")
    if not separator:
        return LocalFileSystem(), name
    try:
        if scheme == "file":
            filesystem = LocalFileSystem()
            path = _path_of_file(name)
        elif scheme in ARROW_SCHEMES:
            filesystem, path = FileSystem.from_uri(_encoded(name))
        else:
            opened, path = url_to_fs(name)
            filesystem = PyFileSystem(FSSpecHandler(opened))
    except Exception as error:  # errors differ by file system; an ImportError of fsspec names the missing package
        raise out_of_reach(name, error) from error
    return filesystem, path


def _path_of_file(uri: str) -> str:
    path = uri.removeprefix("file://").removeprefix("localhost")
    if not path.startswith("/"):
        raise ValueError("a file of this machine has three slashes, file:///directory/file")
    return path


def _encoded(uri: str) -> str:
    """Return the URI in which only what is meant as such is an authority, a path and options."""
    place, options = split_options(uri)
    scheme, _, rest = place.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{quote(authority, safe=_AUTHORITY)}{slash}{quote(path)}{options}"


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
