"""Trackers of a small run, with whatever a test wants to be different."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from megarl.tracking.protocol import Tracker
from megarl.tracking.run import TrackedRun
from megarl.tracking.tracker import make_tracker

OF_RUN = {field.name for field in fields(TrackedRun)}


def tracker_of(name: str, run_dir: Path, **options: Any) -> Tracker:
    """Return the tracker `name`; `options` are fields of `TrackedRun` and arguments of `make_tracker`."""
    facts = {"project": "p", "experiment": "e", "params": {}}
    run = TrackedRun(run_dir=run_dir, **facts | {key: value for key, value in options.items() if key in OF_RUN})
    others = {key: value for key, value in options.items() if key not in OF_RUN}
    return make_tracker([name], run, **{"total_steps": 9, "is_main": True} | others)


def mlflow_client(root: Path) -> Any:
    """Return a client of the MLflow store of the runs in `root`."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")
