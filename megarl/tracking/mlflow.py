"""MLflow: parameters are the resolved config, metrics keep the field's names, tables become artifacts.

A record is in a file of the run's directory before it is sent, by a thread of its own, and until it was: a server that
is away costs neither records nor time. It gets them when it is back, in order and with their times; what is left at the
end is sent by the next run that goes on in the directory.
"""

import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.platform.versions import versions
from megarl.section import flatten
from megarl.tracking.names import Ending
from megarl.tracking.outbox import Outbox
from megarl.tracking.records import is_record
from megarl.tracking.run import TrackedRun
from megarl.tracking.run_id import RUN_ID_FILE

logger = logging.getLogger(__name__)

UNSENT_FILE = "mlflow_unsent.jsonl"
MAX_VALUE_CHARACTERS = 6000  # limit of MLflow's stores
START_S = 20.0  # that a start waits for records of before, once the server answers
CLOSE_S = 120.0  # that an end waits for all records
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between attempts
_STATUS: Mapping[Ending, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)


class Mlflow:
    """One run of an experiment, at `uri` or in the SQLite file `run_dir/mlflow.db` with its artifacts beside it.

    With a `resume_step` the run whose id lies in `run_dir` goes on, and what it has of later steps is not sent twice.
    Where the store does not know it, somebody deleted it there, or it has steps after that which will have other
    numbers now (not `same_curve`), a new one begins: MLflow can take nothing back. A server that does not answer is
    waited for while training goes on; ValueError where the store is no server and cannot be used, or the server
    refuses.
    """

    def __init__(self, uri: str | None, run: TrackedRun) -> None:
        # read when mlflow is imported
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the outbox tries again
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # it would tear our own apart
        from megarl.tracking.mlflow_store import FAILURES, Store, is_absent

        for chatty in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(chatty).setLevel(logging.ERROR if chatty == "urllib3" else logging.WARNING)
        artifacts = None
        if uri is None:
            uri = f"sqlite:///{(run.run_dir / 'mlflow.db').resolve()}"
            artifacts = (run.run_dir / "mlartifacts").resolve().as_uri()
        self._uri = uri
        self._outbox = Outbox(run.run_dir / UNSENT_FILE, is_record)
        opening = {
            "project": run.project,
            "experiment": run.experiment,
            "artifacts": artifacts,
            "params": [(safe_name(key), _cut(str(value))) for key, value in flatten(run.params)],
            "start": uuid.uuid4().hex,
            "tags": {f"version.{name}": version for name, version in versions().items()},
            "time": _now(),
        }
        if run.resume_step is None:
            self._outbox.put({"kind": "open"} | opening)
        else:
            self._drop_later(run.resume_step)
            self._outbox.put({"kind": "resume", "step": run.resume_step, "same_curve": run.same_curve} | opening)
            if run.resume_metrics:
                self.log(run.resume_metrics, step=run.resume_step)
        self._failing = False
        try:
            self._store = Store(uri, run.run_dir / RUN_ID_FILE)
            self._send(until=time.monotonic() + START_S)
        except FAILURES as error:
            if not is_absent(error, uri):
                raise ValueError(f"trainer.logger: MLflow at {uri} cannot be used: {error}") from error
            self._report(error)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step."""
        values = {safe_name(name): float(value) for name, value in metrics.items()}
        self._outbox.put({"kind": "metrics", "step": step, "time": _now(), "values": values})

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Append rows to the table artifact `name`.json; its first column is the step."""
        if rows:
            columns = {key: [row[key] for row in rows] for key in rows[0]}
            self._outbox.put({"kind": "table", "step": step, "file": f"{safe_name(name)}.json", "columns": columns})

    def close(self, summary_rows: Sequence[Mapping[str, Any]] = (), *, ending: Ending = "finished") -> None:
        """Mark the run with how it ended, its summary a text artifact; wait until all is sent, or one try fails."""
        summary = "".join("  ".join(f"{key}={value}" for key, value in row.items()) + "\n" for row in summary_rows)
        self._outbox.put({"kind": "end", "time": _now(), "status": _STATUS[ending], "summary": summary})
        self._closing.set()
        self._outbox.wake()
        self._thread.join(CLOSE_S)
        if left := self._outbox.close():
            logger.warning(
                "MLflow at %s did not take %d records: they are in %s, and the next run that goes on in that directory "
                "sends them",
                self._uri,
                left,
                self._outbox.path,
            )

    def _work(self) -> None:
        """Send whatever comes until `close`, and then all that is left, in one try."""
        pause = FIRST_PAUSE_S
        while True:
            last = self._closing.is_set()
            try:
                self._send()
                pause = FIRST_PAUSE_S
                if not last:
                    self._outbox.wait(self._closing.is_set)
            except Exception as error:  # whatever it is, the record is kept
                self._report(error)
                if not last:
                    self._closing.wait(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
            if last:
                return

    def _send(self, until: float = float("inf")) -> None:
        """Send the records that there are, and on `time.monotonic()` past `until` only some of them."""
        from megarl.tracking.mlflow_store import FAILURES, is_refused

        while time.monotonic() < until and (record := self._outbox.first()):
            try:
                self._store.send(record)
            except FAILURES as error:
                self._store.forget()
                if record["kind"] in ("open", "resume") or not is_refused(error):
                    raise
                logger.warning("MLflow refused a record, training goes on: %s", error)
            self._outbox.drop_first()
            if self._failing:
                self._failing = False
                logger.warning("MLflow at %s answers again and is sent what it missed", self._uri)

    def _report(self, error: Exception) -> None:
        if not self._failing:
            logger.warning(
                "MLflow at %s takes no records, training goes on; they are kept in %s and sent when it does: %s",
                self._uri,
                self._outbox.path,
                error,
            )
        self._failing = True

    def _drop_later(self, step: int) -> None:
        """Drop unsent records of steps that this run makes again; an earlier run of the directory keeps what it had."""
        opens = sum(record["kind"] == "open" for record in self._outbox.records())

        def keep(record: Mapping[str, Any]) -> bool:
            nonlocal opens
            opens -= record["kind"] == "open"
            return opens > 0 or (record["kind"] != "end" and record.get("step", -1) <= step)

        self._outbox.cut(keep)


def safe_name(name: str) -> str:
    """A name that every MLflow store takes: letters, digits and `_-. :/`; `mean@4` becomes `mean_at_4`.

    Stores may keep it as a path, so no part of it is empty or leads up: a data source may be called anything.
    """
    parts = _FORBIDDEN.sub("_", name.replace("@", "_at_")).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."


def _now() -> int:
    return int(time.time() * 1000)
