"""Data files by the name a user gave them: a local path, or a URI of anything that pyarrow or fsspec opens."""

from dataclasses import dataclass
from typing import Any

from fsspec import available_protocols
from fsspec.core import url_to_fs
from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

ARROW_SCHEMES = ("abfs", "abfss", "file", "gcs", "gs", "hdfs", "s3", "viewfs")
"""What pyarrow opens itself; all other schemes are fsspec's."""

_HADOOP = "libhdfs is found through JAVA_HOME, HADOOP_HOME and CLASSPATH=$(hadoop classpath --glob)"
REMEDIES = {
    "s3": "keys and region come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION or from ~/.aws, a server "
    "other than Amazon's from AWS_ENDPOINT_URL",
    "hdfs": _HADOOP,
    "viewfs": _HADOOP,
}


def unknown_scheme(name: str) -> str | None:
    """The scheme in a path or URI, or in one of a chain (`zip://a::s3://b`), that nothing here opens."""
    schemes = [part.partition("://")[0] for part in name.split("::") if "://" in part]
    known = {*ARROW_SCHEMES, *available_protocols()}
    return next((scheme for scheme in schemes if scheme not in known), None)


@dataclass(frozen=True)
class Location:
    """A file that can be opened again and again, for reading at any place in it."""

    name: str  # as the user wrote it
    filesystem: Any
    path: str

    def open(self) -> Any:
        """The file, as a `pyarrow.NativeFile`; ValueError where it is missing or out of reach."""
        try:
            return self.filesystem.open_input_file(self.path)
        except FileNotFoundError as error:
            raise ValueError(f"no such data file: {self.name}") from error
        except Exception as error:  # each filesystem has errors of its own
            raise _out_of_reach(self.name, error) from error


def locate(name: str) -> Location:
    """Find the filesystem of a path or URI; nothing is read yet. Raises ValueError where there is none."""
    scheme, separator, _ = name.partition("://")
    if not separator:
        return Location(name, LocalFileSystem(), name)
    try:
        if scheme in ARROW_SCHEMES:
            filesystem, path = FileSystem.from_uri(name)
        else:
            opened, path = url_to_fs(name)
            filesystem = PyFileSystem(FSSpecHandler(opened))
    except Exception as error:  # as above; and fsspec says by ImportError what to install
        raise _out_of_reach(name, error) from error
    return Location(name, filesystem, path)


def _out_of_reach(name: str, error: Exception) -> ValueError:
    remedy = REMEDIES.get(name.partition("://")[0], "check the name, and that this machine may read it")
    reason = str(error).partition("\n")[0]
    return ValueError(f"{name} cannot be opened: {reason} ({remedy})")
