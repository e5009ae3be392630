"""The metrics that a run has recorded, read from the files of its directory."""

from collections.abc import Callable
from pathlib import Path

from megarl.tracking.jsonl import METRICS_FILE, read_jsonl
from megarl.tracking.lines import Row
from megarl.tracking.run_id import RUN_ID_FILE, known_run_id

DATABASE = "mlflow.db"


def read_history(run_dir: Path, wanted: Callable[[str], bool] = lambda name: True) -> list[Row]:
    """Return one object per step, with `step`, `time` (Unix seconds) and the `wanted` metrics.

    Reads `metrics.jsonl`, or else the run's own MLflow database. Empty if the directory has neither.
    """
    if (run_dir / METRICS_FILE).is_file():
        return [
            {name: value for name, value in row.items() if name in ("step", "time") or wanted(name)}
            for row in read_jsonl(run_dir / METRICS_FILE)
        ]
    run_id = known_run_id(run_dir / RUN_ID_FILE)
    return _from_mlflow(run_dir / DATABASE, run_id, wanted) if run_id and (run_dir / DATABASE).is_file() else []


def _from_mlflow(database: Path, run_id: str, wanted: Callable[[str], bool]) -> list[Row]:
    from mlflow import MlflowClient  # takes seconds

    client = MlflowClient(tracking_uri=f"sqlite:///{database.resolve()}")
    rows: dict[int, Row] = {}
    for stored in client.get_run(run_id).data.metrics:
        if wanted(name := stored.replace("_at_", "@")):
            for point in client.get_metric_history(run_id, stored):
                rows.setdefault(point.step, {"step": point.step, "time": point.timestamp / 1000})[name] = point.value
    return [rows[step] for step in sorted(rows)]
