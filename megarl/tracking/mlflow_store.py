"""One run in an MLflow store, written record by record; a record that the store already has changes nothing.

The store itself is asked for the last step of every metric and table. So neither a lost reply nor steps that run again
after a crash lead to duplicates.
"""

import json
import logging
import os
import posixpath
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Metric, Param
from mlflow.exceptions import InvalidUrlException, MlflowException

from megarl.platform.files import write_whole
from megarl.platform.safe_names import with_digest
from megarl.tracking.mlflow_inputs import log_inputs
from megarl.tracking.run_id import known_run_id

logger = logging.getLogger(__name__)

MAX_PARAMS_PER_BATCH = 100
MAX_METRICS_PER_BATCH = 1000
START_TAG, NOTE = "megarl.start", "mlflow.note.content"
HEADLINES = ("val/score", "train/reward", "train/kl")
FAILURES = (MlflowException, OSError)


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
    """The run whose id is in `id_file`, or that the next `open` record creates.

    Every method raises one of `FAILURES` if the store fails. Times are Unix times in milliseconds.
    """

    def __init__(self, uri: str, id_file: Path) -> None:
        self._client = MlflowClient(tracking_uri=uri)
        self._id_file = id_file
        self._run_id = known_run_id(id_file) or ""
        self._last: dict[str, int] | None = None  # metric or table -> its last step; None: ask the store
        self._folded = set[str]()  # keys of metrics, as a store sees them that ignores the case of letters
        self._refused = set[str]()  # keys that were warned about

    def forget(self) -> None:
        """Forget what the store has, because a request failed: ask again."""
        self._last = None

    def send(self, record: Mapping[str, Any]) -> None:
        """Send a record of `megarl.tracking.mlflow.Mlflow` to the store."""
        content = dict(record)
        getattr(self, f"_{content.pop('kind')}")(**content)

    def _open(
        self, project: str, experiment: str, artifacts: str | None, params: list[list[str]], start: str, **more: Any
    ) -> None:
        """Create the run, unless a run with this `start` exists already."""
        experiment_id = self._experiment(project, artifacts)
        if found := self._client.search_runs([experiment_id], f"tags.`{START_TAG}` = '{start}'"):
            run = found[0]
        else:
            tags = more["tags"] | {START_TAG: start}
            run = self._client.create_run(experiment_id, run_name=experiment, tags=tags, start_time=more["time"])
        run_id = str(run.info.run_id)
        place = glance(run_id, experiment_id)
        note = more["tags"].get(NOTE, "")
        self._client.set_tag(run_id, NOTE, f"{note}\n\n[Score, reward and KL in one chart]({place})")
        self._log(run_id, "params", [Param(*item) for item in params], MAX_PARAMS_PER_BATCH)
        log_inputs(self._client, run, more.get("data", []), more.get("model"))
        write_whole(self._id_file, run_id.encode())
        self._run_id, self._last = run_id, None  # only now: after a failure the next attempt completes the run

    def _experiment(self, project: str, artifacts: str | None) -> str:
        """Return the id of a project's experiment, which another run may create at the same time."""
        try:
            if not (known := self._client.get_experiment_by_name(project)):
                return str(self._client.create_experiment(project, artifact_location=artifacts))
        except MlflowException:
            if not (known := self._client.get_experiment_by_name(project)):
                raise
        return str(known.experiment_id)

    def _resume(self, step: int, same_curve: bool, **opening: Any) -> None:
        """Continue the run, or open another one if its records cannot continue after `step`."""
        if self._run_id and not self._can_continue(step, same_curve):
            self._run_id = ""  # so that later attempts neither ask nor warn again
        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._open(**opening)

    def _can_continue(self, step: int, same_curve: bool) -> bool:
        self._last = None
        if not self._is_known(self._run_id):
            logger.warning("MLflow does not know the run %s, or it was deleted there; a new one begins", self._run_id)
            return False
        last = max(self._last_steps().values(), default=0)
        if not same_curve and last > step:
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

    def _metrics(self, step: int, time: int, values: Mapping[str, float]) -> None:
        last = self._last_steps()
        keyed = {self._key(name): value for name, value in values.items()}
        new = [Metric(key, value, time, step) for key, value in keyed.items() if step > last.get(key, -1)]
        self._log(self._run_id, "metrics", new, MAX_METRICS_PER_BATCH)
        last.update((metric.key, step) for metric in new)

    def _key(self, name: str) -> str:
        """Return the key of a metric. A store that ignores the case of letters knows the first of two spellings."""
        if name in self._last_steps():
            return name
        key = with_digest(name, name) if name.casefold() in self._folded else name
        self._folded.add(key.casefold())
        return key

    def _log(self, run_id: str, kind: str, items: Sequence[Any], size: int) -> None:
        """Log metrics or parameters in batches. A record that the store refuses is lost alone, with one warning."""
        for batch in _batches(items, size):
            self._log_batch(run_id, kind, batch)

    def _log_batch(self, run_id: str, kind: str, items: Sequence[Any]) -> None:
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

    def _table(self, step: int, file: str, columns: dict[str, list[Any]]) -> None:
        last = self._last_steps()
        if file not in last:
            last[file] = self._last_step_of_table(file)
        if step > last[file]:
            self._client.log_table(self._run_id, {"step": [step] * len(next(iter(columns.values())))} | columns, file)
            last[file] = step

    def _files(self, paths: Sequence[str]) -> None:
        """Keep the files that exist as artifacts, in place of those of the same names."""
        for path in filter(os.path.isfile, paths):
            self._client.log_artifact(self._run_id, path)

    def _end(self, time: int, status: str, summary: str) -> None:
        if summary:
            self._client.log_text(self._run_id, summary, "summary.txt")
        self._client.set_terminated(self._run_id, status, end_time=time)

    def _last_steps(self) -> dict[str, int]:
        if self._last is None:
            metrics = self._client.get_run(self._run_id).data.to_proto().metrics
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


def _batches(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
