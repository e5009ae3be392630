"""The place of the MLflow store of a run: a server, or one SQLite file for all runs of a project."""

import os
import shlex
import stat
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from megarl.platform.files import write_whole

DATABASE = "mlflow.db"
ARTIFACTS = "mlartifacts"
MEMORY = Path("/dev/shm")  # a file system in memory, on Linux
SERVED_AT = "http://127.0.0.1:5000"  # by `mlflow ui`
BUSY_S = 60  # wait for other runs that write to the same file


def database_of(run_dir: Path) -> Path:
    """Return the SQLite file of a run's project: it is next to the directories of the runs, which it compares.

    A run that has a file of its own keeps it. A run also gets a file of its own if its user cannot write next to its
    directory, or shares that place with everybody, such as /tmp.
    """
    own = run_dir / DATABASE
    parent = run_dir.resolve().parent
    existing = next(path for path in (parent, *parent.parents) if path.exists())
    is_shared = bool(existing.stat().st_mode & stat.S_ISVTX)
    if own.exists() or is_shared or not os.access(existing, os.W_OK):
        return own.resolve()
    return parent / DATABASE


def tracking_uri(configured: str | None, run_dir: Path) -> str:
    """Return the URI of the store: as configured, or MLFLOW_TRACKING_URI, or the SQLite file of the project."""
    return configured or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database_of(run_dir)}"


def create_database(path: Path) -> None:
    """Write the tables of an empty MLflow store to an SQLite file, unless the file exists.

    MLflow makes the tables in a hundred commits. They are slow on a network drive, and MLflow cannot use a file in
    which a killed process made half of them. So the file is completed in memory before it appears at `path`. Of several
    runs that create it at the same time, one does, and the others use its file.
    """
    if path.exists():
        return
    from mlflow import MlflowClient  # takes seconds to import, and only one rank needs it

    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
        database = Path(directory) / path.name
        MlflowClient(tracking_uri=f"sqlite:///{database}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(part, database.read_bytes())
    try:
        with suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink()


def how_to_open(uri: str, run_id: str | None) -> str:
    """Return the address of a run in a store, or of the store if the run is unknown; for a file with its command."""
    page = f"/#/runs/{run_id}" if run_id else ""
    if uri.startswith(("http://", "https://")):
        return f"{uri.rstrip('/')}{page}"
    return f"mlflow ui --backend-store-uri {shlex.quote(uri)}, then open {SERVED_AT}{page}"
