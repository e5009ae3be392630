"""MLflow: parameters are the resolved configuration, metrics keep their names, tables become artifacts.

A thread reads the files of the run from their first line on and sends what the store lacks; the store says what it has.
So a server that is down costs neither records nor time: it gets the records when it is back, in order and with their
times, from this process or from the next one that resumes the run in the directory.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from megarl.platform.errors import UserError
from megarl.tracking.history import HISTORY_FILE
from megarl.tracking.jsonl import METRICS_FILE, Jsonl, Unread, table_file
from megarl.tracking.mlflow_place import ARTIFACTS, BUSY_S, create_database, database_of
from megarl.tracking.names import Ending
from megarl.tracking.protocol import Row
from megarl.tracking.run import TrackedRun
from megarl.tracking.samples import GENERATIONS, pairs

logger = logging.getLogger(__name__)

CLOSE_S = 120.0  # wait at the end for all records to be sent
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between attempts
BEFORE_AND_NOW = "val/before_and_now"
KEPT = ("config.yaml", METRICS_FILE, HISTORY_FILE, table_file(GENERATIONS), "report.html")  # files kept as artifacts
_STATUS: Mapping[Ending, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class Mlflow:
    """One run of an experiment, at `mlflow_tracking_uri` or in the SQLite file of the project (see `mlflow_place`).

    With a `resume_step` the run whose id is in `run_dir` continues, and later steps that it has are not sent twice. A
    new run begins if the store does not know the run, if somebody deleted it, or if it has later steps that will get
    other numbers (`same_curve` is False), because MLflow cannot remove metrics. Training continues while a server
    does not respond. UserError if a local store cannot be used, or a server refuses.

    Args:
        run: the run to record.
        records: the files of the run, which have each record before this tracker gets it.
    """

    def __init__(self, run: TrackedRun, records: Jsonl) -> None:
        # read when mlflow is imported
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the thread tries again
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # it would break our progress bar
        from megarl.tracking.mlflow_store import FAILURES, Store, is_absent

        for chatty, level in (
            ("mlflow", logging.WARNING),
            ("mlflow.system_metrics", logging.ERROR),  # they may be lost, and a missing server is reported once
            ("alembic", logging.WARNING),
            ("urllib3", logging.ERROR),
        ):
            logging.getLogger(chatty).setLevel(level)
        artifacts = database = None
        uri = run.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            database = database_of(run.run_dir)
            uri = f"sqlite:///{database}"
            artifacts = (database.parent / ARTIFACTS).as_uri()
        self._uri = uri
        self._run_dir = run.run_dir
        self._unread = Unread(records)
        self._first_samples: Sequence[Row] = ()  # of the first validation
        self._failing = self._is_open = self._is_complete = False
        self._changed = threading.Event()
        self._closing = threading.Event()
        try:
            if database:
                create_database(database)
            self._store = Store(f"{uri}?timeout={BUSY_S}" if database else uri, run, artifacts)
            self._open()
        except FAILURES as error:
            if not is_absent(error, uri):
                raise UserError(f"trainer.logger: MLflow at {uri} cannot be used: {error}") from error
            self._report(error)
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Let the thread send the metrics, which are in a file of the run."""
        self._changed.set()

    def log_table(self, name: str, rows: Sequence[Row], *, step: int) -> None:
        """Let the thread append the rows to the table artifact `name`.json.

        A validation also appends its responses, next to those of the first validation, to val/before_and_now.json.
        """
        self._changed.set()

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Record how the run ended, with its files and the summary; wait until all is sent or a try fails."""
        summary = ""
        for row in summary_rows:
            summary += "  ".join(f"{key}={value}" for key, value in row.items()) + "\n"
        self._end = int(time.time() * 1000), _STATUS[ending], summary
        self._closing.set()
        self._changed.set()
        self._thread.join(CLOSE_S)
        if not self._is_complete:
            logger.warning(
                "MLflow at %s lacks the last records, %d lines of metrics among them: they are in %s, and the next "
                "process that resumes the run in that directory sends them",
                *(self._uri, sum(map(len, self._unread.metrics())), self._run_dir),
            )

    def _work(self) -> None:
        """Send new records until `close`, and then try once to send all that are left."""
        pause = FIRST_PAUSE_S
        while not self._is_complete:
            self._changed.clear()
            is_last = self._closing.is_set()
            try:
                self._send(is_last=is_last)
                pause = FIRST_PAUSE_S
                self._is_complete = is_last
                if not self._closing.is_set():
                    self._changed.wait()
            except Exception as error:  # on any error the records are kept
                self._report(error)
                if is_last:
                    return
                self._closing.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _open(self) -> None:
        if not self._is_open:
            self._store.begin()
            self._is_open = True

    def _send(self, *, is_last: bool) -> None:
        """Send all that the store lacks; the last time the files and the end of the run, too."""
        self._open()
        for rows in self._unread.metrics():
            # MLflow should list the headlines of training first, too, and they come only with the first step
            waits = not is_last and rows[-1]["step"] == 0
            with self._sending():
                self._store.log_metrics(rows, only_headlines=waits)
            if waits:
                break
        for name, rows in self._unread.tables():
            with self._sending():
                self._send_table(name, rows)
        if is_last:
            for file in KEPT:
                with self._sending():
                    self._store.log_file(self._run_dir / file)
            with self._sending():
                self._store.end(*self._end)

    def _send_table(self, name: str, rows: Sequence[Row]) -> None:
        self._store.log_table(name, rows)
        if name == GENERATIONS:
            self._first_samples = self._first_samples or rows
            first = self._first_samples[0]["step"]
            step = rows[0]["step"]
            changes = pairs(self._first_samples, rows) if first < step else []
            if changes:
                self._store.log_table(BEFORE_AND_NOW, [{"step": step} | pair.cells() for pair in changes])

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Report that the store refuses what the block sends. Any other failure is raised."""
        from megarl.tracking.mlflow_store import FAILURES, is_refused

        try:
            yield
        except Exception as error:
            self._store.forget()
            is_refusal = isinstance(error, FAILURES) and is_refused(error)
            if not is_refusal:
                raise
            logger.warning("MLflow refused a record, training continues: %s", error)
        if self._failing:
            self._failing = False
            logger.warning("MLflow at %s responds again and gets the waiting records", self._uri)

    def _report(self, error: Exception) -> None:
        if not self._failing:
            logger.warning(
                "MLflow at %s accepts no records, training continues; they wait in %s until it does: %s",
                *(self._uri, self._run_dir / METRICS_FILE, error),
            )
        self._failing = True
