"""The place of the MLflow store of a run: a server, or one SQLite file for all runs of a project."""

import os
import stat
from pathlib import Path

DATABASE, ARTIFACTS = "mlflow.db", "mlartifacts"
BUSY_S = 60  # wait for other runs that write to the same file


def database_of(run_dir: Path) -> Path:
    """Return the SQLite file of a run's project: it is next to the directories of the runs, which it compares.

    A run that has a file of its own keeps it. A run also gets a file of its own if its user cannot write next to its
    directory, or shares that place with everybody, such as /tmp.
    """
    own, parent = run_dir / DATABASE, run_dir.resolve().parent
    existing = next(path for path in (parent, *parent.parents) if path.exists())
    is_shared = bool(existing.stat().st_mode & stat.S_ISVTX)
    if own.exists() or is_shared or not os.access(existing, os.W_OK):
        return own.resolve()
    return parent / DATABASE


def tracking_uri(configured: str | None, run_dir: Path) -> str:
    """Return the URI of the store: as configured, or MLFLOW_TRACKING_URI, or the SQLite file of the project."""
    return configured or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database_of(run_dir)}"


def how_to_open(uri: str) -> str:
    """Return what opens a store: its address, or a command."""
    return uri if uri.startswith(("http://", "https://")) else f"mlflow ui --backend-store-uri {uri}"
