"""One run in an MLflow store; what the store already has is not sent again.

The store itself is asked for the last step of every metric and table. So neither a lost reply nor steps that run again
after a crash lead to duplicates.
"""

import json
import logging
import posixpath
import tempfile
import time
import uuid
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from urllib.parse import quote, urlencode

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Metric, Param
from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING as SYSTEM_METRICS
from mlflow.exceptions import InvalidUrlException, MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from megarl.platform.files import write_whole
from megarl.platform.safe_names import mlflow_key, mlflow_title, with_digest
from megarl.tracking.jsonl import time_of, values_of
from megarl.tracking.mlflow_inputs import log_inputs, params_of, tags_of
from megarl.tracking.names import headlines
from megarl.tracking.protocol import Row
from megarl.tracking.run import TrackedRun
from megarl.tracking.run_id import RUN_ID_FILE, known_run_id

logger = logging.getLogger(__name__)

MAX_PARAMS_PER_BATCH = 100
MAX_METRICS_PER_BATCH = 1000
START_TAG = "megarl.start"
FIRST_STEP_TAG = "megarl.first_step"
NOTE = "mlflow.note.content"
HEADLINES = ("val/score", "train/reward", "train/kl")
FAILURES = (MlflowException, OSError)
SYSTEM = "system/"
"""Begins the names of MLflow's own metrics of the host, whose steps count samples."""
SAMPLED_S = 10


def glance(run_id: str, experiment_id: str) -> str:
    """Return the place, in MLflow's own pages, of one chart that shows what a run has learnt."""
    query = {
        "runs": [run_id],
        "experiments": [experiment_id],
        "metric": HEADLINES[0],
        "plot_metric_keys": HEADLINES,
    }
    words = {key: json.dumps(value) for key, value in query.items()} | {"x_axis": "step"}
    return f"#/metric?{urlencode(words, quote_via=quote)}"


class Store:
    """A run, in MLflow the run whose id is in its directory, or that `begin` opens.

    Every method raises one of `FAILURES` if the store fails; then `forget` must follow.
    """

    def __init__(self, uri: str, run: TrackedRun, artifacts: str | None) -> None:
        """Prepare a store at `uri`, which keeps files at `artifacts`; None lets it decide."""
        self._client = MlflowClient(tracking_uri=uri)
        self._uri = uri
        self._run = run
        self._monitor: SystemMetricsMonitor | None = None
        self._artifacts = artifacts
        self._start = uuid.uuid4().hex
        self._time = int(time.time() * 1000)
        self._id_file = run.run_dir / RUN_ID_FILE
        self._run_id = known_run_id(self._id_file) or ""
        self._first_step = 0  # after a run that cannot continue: the next run has no earlier steps
        self._last: dict[str, int] | None = None  # metric or table -> its last step; None: ask the store
        self._folded = set[str]()  # keys of metrics, as a store sees them that ignores the case of letters
        self._refused = set[str]()  # keys that were warned about

    def forget(self) -> None:
        """Forget what the store has, because a request failed: ask again."""
        self._last = None

    def begin(self) -> None:
        """Continue the run after its `resume_step`, or open another one if there is none that can continue."""
        if self._run.resume_step is None:
            self._id_file.unlink(missing_ok=True)  # the process that resumes this run must not continue an earlier one
            self._run_id = ""
        elif self._run_id and not self._can_continue(self._run.resume_step):
            self._run_id = ""  # so that later attempts neither ask nor warn again
            self._first_step = self._run.first_step
        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._open()
        if SYSTEM_METRICS.get() or not SYSTEM_METRICS.is_set():
            self._monitor = SystemMetricsMonitor(self._run_id, SAMPLED_S, resume_logging=True, tracking_uri=self._uri)
            self._monitor.start()

    def _open(self) -> None:
        """Create the run, unless an attempt created it whose reply was lost."""
        experiment_id = self._experiment(mlflow_title(self._run.project))
        tags = tags_of(self._run) | {START_TAG: self._start, FIRST_STEP_TAG: str(self._first_step)}
        found = self._client.search_runs([experiment_id], f"tags.`{START_TAG}` = '{self._start}'")
        if found:
            run = found[0]
        else:
            run = self._client.create_run(experiment_id, self._time, tags, mlflow_title(self._run.experiment))
        run_id = str(run.info.run_id)
        place = glance(run_id, experiment_id)
        self._client.set_tag(run_id, NOTE, f"{tags[NOTE]}\n\n[Score, reward and KL in one chart]({place})")
        params = [Param(*item) for item in params_of(self._run.params)]
        self._log(run_id, "params", params, MAX_PARAMS_PER_BATCH)
        log_inputs(self._client, run, self._run.params)
        write_whole(self._id_file, run_id.encode())
        self._run_id, self._last = run_id, None  # only now: after a failure the next attempt completes the run

    def _experiment(self, project: str) -> str:
        """Return the id of a project's experiment, which another run may create at the same time."""
        try:
            known = self._client.get_experiment_by_name(project)
            if not known:
                return str(self._client.create_experiment(project, artifact_location=self._artifacts))
        except MlflowException:
            known = self._client.get_experiment_by_name(project)
            if not known:
                raise
        return str(known.experiment_id)

    def _can_continue(self, step: int) -> bool:
        self._last = None
        if not self._is_known(self._run_id):
            logger.warning("MLflow does not know the run %s, or it was deleted there; a new one begins", self._run_id)
            return False
        last = max(self._last_steps().values(), default=0)
        if not self._run.same_curve and last > step:
            logger.warning(
                "the MLflow run %s has steps after %d that will differ, a new one begins", self._run_id, step
            )
            return False
        return True

    def _is_known(self, run_id: str) -> bool:
        try:
            stage = self._client.get_run(run_id).info.lifecycle_stage
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return bool(stage == LifecycleStage.ACTIVE)

    def log_metrics(self, rows: Sequence[Row], *, only_headlines: bool = False) -> None:
        """Log lines of metrics, first their headlines: MLflow lists metrics in the order of their arrival."""
        last = self._last_steps()
        new = []
        rows = [row for row in rows if row["step"] >= self._first_step]
        numbers = list(map(values_of, rows))
        lines = list(map(headlines, numbers))
        if not only_headlines:
            lines += numbers
        for row, values in zip(cycle(rows), lines, strict=False):
            for name, value in values.items():
                key = self._key(mlflow_key(name))
                if row["step"] > last.get(key, -1):
                    last[key] = row["step"]
                    new.append(Metric(key, float(value), int(1000 * time_of(row)), row["step"]))
        self._log(self._run_id, "metrics", new, MAX_METRICS_PER_BATCH)

    def _key(self, name: str) -> str:
        """Return the key of a metric. A store that ignores the case of letters knows the first of two spellings."""
        if name in self._last_steps():
            return name
        key = with_digest(name, name) if name.casefold() in self._folded else name
        self._folded.add(key.casefold())
        return key

    def _log(self, run_id: str, kind: str, items: Sequence[Metric | Param], size: int) -> None:
        """Log metrics or parameters in batches. A record that the store refuses is lost alone, with one warning."""
        for start in range(0, len(items), size):
            self._log_batch(run_id, kind, items[start : start + size])

    def _log_batch(self, run_id: str, kind: str, items: Sequence[Metric | Param]) -> None:
        try:
            self._client.log_batch(run_id, **{kind: items})
        except MlflowException as error:
            if not is_refused(error) or not self._is_known(run_id):
                raise
            if len(items) > 1:
                middle = len(items) // 2
                self._log_batch(run_id, kind, items[:middle])
                self._log_batch(run_id, kind, items[middle:])
            elif items[0].key not in self._refused:
                self._refused.add(items[0].key)
                logger.warning("MLflow refuses %s of %s, training continues: %s", items[0].key, kind, error)

    def log_table(self, name: str, rows: Sequence[Row]) -> None:
        """Append rows of one step to the table artifact `name`.json; their first column is the step."""
        file = f"{mlflow_key(name)}.json"
        last = self._last_steps()
        if file not in last:
            last[file] = max(self._last_step_of_table(file), self._first_step - 1)
        if rows[0]["step"] > last[file]:
            columns = {key: [row.get(key) for row in rows] for key in rows[0]}
            self._client.log_table(self._run_id, columns, file)
            last[file] = rows[0]["step"]

    def log_file(self, path: Path) -> None:
        """Keep a file, if it exists, as an artifact in place of that of the same name."""
        if path.is_file():
            self._client.log_artifact(self._run_id, str(path))

    def end(self, time: int, status: str, summary: str) -> None:
        """Record the summary, and how the run ended."""
        if self._monitor:
            self._monitor.finish()
            self._monitor = None
        if summary:
            self._client.log_text(self._run_id, summary, "summary.txt")
        self._client.set_terminated(self._run_id, status, end_time=time)

    def _last_steps(self) -> dict[str, int]:
        if self._last is None:
            data = self._client.get_run(self._run_id).data
            metrics = [metric for metric in data.to_proto().metrics if not metric.key.startswith(SYSTEM)]
            first_step = data.tags.get(FIRST_STEP_TAG, "")
            self._first_step = int(first_step) if first_step.isdecimal() else 0
            self._last = {metric.key: metric.step for metric in metrics}  # a run lists the latest value of each
            self._folded = {metric.key.casefold() for metric in metrics}
        return self._last

    def _last_step_of_table(self, file: str) -> int:
        files = self._client.list_artifacts(self._run_id, posixpath.dirname(file) or None)
        if file not in [found.path for found in files]:
            return -1
        with tempfile.TemporaryDirectory() as scratch:
            table = json.loads(
                Path(self._client.download_artifacts(self._run_id, file, scratch)).read_text(encoding="utf-8")
            )
        place = table["columns"].index("step")
        return max((row[place] for row in table["data"]), default=-1)


def is_absent(error: Exception, uri: str) -> bool:
    """Return whether an error means that a server is absent or not ready, not that the request is wrong."""
    if not uri.startswith(("http://", "https://")) or isinstance(error, InvalidUrlException):
        return False
    return not 400 <= _status(error) < 500 or _status(error) in (408, 429)


def is_refused(error: Exception) -> bool:
    """Return whether an error means that the store will never accept this record: it is wrong, or too large."""
    return _status(error) in (400, 413)


def _status(error: Exception) -> int:
    return error.get_http_status_code() if isinstance(error, MlflowException) else 500
