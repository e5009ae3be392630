"""MLflow: parameters are the resolved configuration, metrics keep their names, tables become artifacts.

A record stays in a file of the run's directory until a thread has sent it. So a server that is down costs neither
records nor time: it gets the records when it is back, in order and with their times. The next process that resumes the
run in the directory sends records that are left at the end.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.platform.errors import UserError
from megarl.platform.safe_names import MLFLOW_LONGEST, mlflow_key, mlflow_title, with_digest
from megarl.platform.versions import versions
from megarl.section import flatten
from megarl.tracking.history import HISTORY_FILE, origin
from megarl.tracking.jsonl import METRICS_FILE, read_jsonl, table_file
from megarl.tracking.mlflow_place import ARTIFACTS, BUSY_S, create_database, database_of
from megarl.tracking.names import Ending, headlines
from megarl.tracking.outbox import Outbox
from megarl.tracking.records import is_record
from megarl.tracking.run import TrackedRun
from megarl.tracking.run_id import RUN_ID_FILE
from megarl.tracking.samples import GENERATIONS, pairs

logger = logging.getLogger(__name__)

UNSENT_FILE = "mlflow_unsent.jsonl"
MAX_VALUE_CHARACTERS = 6000  # the limit of MLflow's stores
MAX_SHOWN_CHARACTERS = 2000  # of the command, in a tag
START_S = 20.0  # wait at the start for earlier records to be sent, once the server responds
CLOSE_S = 120.0  # wait at the end for all records to be sent
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between attempts
BEFORE_AND_NOW = "val/before_and_now"
KEPT = ("config.yaml", METRICS_FILE, HISTORY_FILE, table_file(GENERATIONS), "report.html")  # files kept as artifacts
_STATUS: Mapping[Ending, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class Mlflow:
    """One run of an experiment, at `uri` or in the SQLite file of the project (see `mlflow_place`).

    With a `resume_step` the run whose id is in `run_dir` continues, and later steps that it has are not sent twice. A
    new run begins if the store does not know the run, if somebody deleted it, or if it has later steps that will get
    other numbers (`same_curve` is False), because MLflow cannot remove metrics. Training continues while a server
    does not respond. UserError if a local store cannot be used, or a server refuses.
    """

    def __init__(self, uri: str | None, run: TrackedRun) -> None:
        # read when mlflow is imported
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the outbox tries again
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # it would break our progress bar
        from megarl.tracking.mlflow_inputs import data_of, model_of
        from megarl.tracking.mlflow_store import FAILURES, Store, is_absent

        for chatty in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(chatty).setLevel(logging.ERROR if chatty == "urllib3" else logging.WARNING)
        artifacts = database = None
        if uri is None:
            database = database_of(run.run_dir)
            uri = f"sqlite:///{database}"
            artifacts = (database.parent / ARTIFACTS).as_uri()
        self._uri, self._run_dir = uri, run.run_dir
        self._waiting = dict[str, float]()
        self._outbox = Outbox(run.run_dir / UNSENT_FILE, is_record)
        opening = {
            "project": mlflow_title(run.project),
            "experiment": mlflow_title(run.experiment),
            "artifacts": artifacts,
            "params": _params(run.params),
            "start": uuid.uuid4().hex,
            "tags": tags_of(run),
            "data": list(data_of(run.params)),
            "model": model_of(run.params),
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
            if database:
                create_database(database)
            patient = f"{uri}?timeout={BUSY_S}" if database else uri
            self._store = Store(patient, run.run_dir / RUN_ID_FILE)
            self._send(until=time.monotonic() + START_S)
        except FAILURES as error:
            if not is_absent(error, uri):
                raise UserError(f"trainer.logger: MLflow at {uri} cannot be used: {error}") from error
            self._report(error)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step.

        MLflow lists metrics in the order of their arrival, and the headlines come first. So what a validation before
        the first step measures besides waits for that step, which has the other headlines.
        """
        first = headlines(metrics)
        if step == 0:
            self._put(first, step=0)
            self._waiting = dict(metrics)
            return
        if self._waiting:
            self._put(first, step=step)
            self._put_waiting()
        self._put(first | dict(metrics), step=step)

    def _put(self, metrics: Mapping[str, float], *, step: int) -> None:
        values = {mlflow_key(name): float(value) for name, value in metrics.items()}
        self._outbox.put({"kind": "metrics", "step": step, "time": _now(), "values": values})

    def _put_waiting(self) -> None:
        if self._waiting:
            self._put(self._waiting, step=0)
        self._waiting = {}

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Append rows to the table artifact `name`.json; its first column is the step.

        A validation also appends its responses, next to those of the first validation, to val/before_and_now.json.
        """
        if rows:
            columns = {key: [row[key] for row in rows] for key in rows[0]}
            self._outbox.put({"kind": "table", "step": step, "file": f"{mlflow_key(name)}.json", "columns": columns})
        if name == GENERATIONS and (changes := pairs(self._first_samples(before=step), rows)):
            self.log_table(BEFORE_AND_NOW, [pair.cells() for pair in changes], step=step)

    def _first_samples(self, *, before: int) -> Sequence[Mapping[str, Any]]:
        """Return the samples of the first validation, which are in a file of the run; none if there is none before."""
        if not (path := self._run_dir / table_file(GENERATIONS)).is_file():
            return []
        rows = read_jsonl(path)
        first = min((row["step"] for row in rows), default=before)
        return [row for row in rows if row["step"] == first < before]

    def close(self, summary_rows: Sequence[Mapping[str, Any]] = (), *, ending: Ending = "finished") -> None:
        """Record how the run ended, with its files and the summary; wait until all is sent or a try fails."""
        summary = "".join("  ".join(f"{key}={value}" for key, value in row.items()) + "\n" for row in summary_rows)
        self._put_waiting()
        self._outbox.put({"kind": "files", "paths": [str(self._run_dir / name) for name in KEPT]})
        self._outbox.put({"kind": "end", "time": _now(), "status": _STATUS[ending], "summary": summary})
        self._closing.set()
        self._outbox.wake()
        self._thread.join(CLOSE_S)
        if left := self._outbox.close():
            logger.warning(
                "%d records were not sent to MLflow at %s: they are in %s, and the next process that resumes the "
                "run in that directory sends them",
                left,
                self._uri,
                self._outbox.path,
            )

    def _work(self) -> None:
        """Send new records until `close`, and then try once to send all that are left."""
        pause = FIRST_PAUSE_S
        while True:
            last = self._closing.is_set()
            try:
                self._send()
                pause = FIRST_PAUSE_S
                if not last:
                    self._outbox.wait(self._closing.is_set)
            except Exception as error:  # on any error the record is kept
                self._report(error)
                if not last:
                    self._closing.wait(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
            if last:
                return

    def _send(self, until: float = float("inf")) -> None:
        """Send all records in the outbox; stop early when `time.monotonic()` passes `until`."""
        from megarl.tracking.mlflow_store import FAILURES, is_refused

        while time.monotonic() < until and (record := self._outbox.first()):
            try:
                self._store.send(record)
            except FAILURES as error:
                self._store.forget()
                if record["kind"] in ("open", "resume") or not is_refused(error):
                    raise
                logger.warning("MLflow refused a record, training continues: %s", error)
            self._outbox.drop_first()
            if self._failing:
                self._failing = False
                logger.warning("MLflow at %s responds again and gets the waiting records", self._uri)

    def _report(self, error: Exception) -> None:
        if not self._failing:
            logger.warning(
                "MLflow at %s accepts no records, training continues; they wait in %s until it does: %s",
                self._uri,
                self._outbox.path,
                error,
            )
        self._failing = True

    def _drop_later(self, step: int) -> None:
        """Drop unsent records of steps that will run again; keep those of an earlier run in the directory."""
        opens = sum(record["kind"] == "open" for record in self._outbox.records())

        def keep(record: Mapping[str, Any]) -> bool:
            nonlocal opens
            opens -= record["kind"] == "open"
            return opens > 0 or (record["kind"] != "end" and record.get("step", -1) <= step)

        self._outbox.cut(keep)


def _params(params: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the parameters of a run. Their keys differ by more than their case, because some stores ignore it."""
    shown = dict[str, tuple[str, str]]()  # by the casefolded key
    for number, (name, value) in enumerate(flatten(params)):
        key = mlflow_key(name)
        if key.casefold() in shown:
            key = with_digest(key, f"{number} {name}")
        shown[key.casefold()] = (key, _cut(str(value)))
    return list(shown.values())


def tags_of(run: TrackedRun) -> dict[str, str]:
    """Return the tags of a run: description, command, user, directory, commit, and versions of packages."""
    facts = origin()
    where = f"`{run.run_dir.resolve()}` on {facts['host']}"
    command = _cut(facts["command"], MAX_SHOWN_CHARACTERS)
    tags = {
        "mlflow.note.content": f"{where}\n\n```\n{command}\n```\n\nThe artifact report.html sums the run up.",
        "mlflow.source.name": _cut(_short(facts["command"]), MLFLOW_LONGEST),
        "mlflow.source.type": "LOCAL",
        "mlflow.user": _cut(facts["user"], MLFLOW_LONGEST),
        "megarl.run_dir": str(run.run_dir.resolve()),
    }
    tags |= {"mlflow.source.git.commit": facts["commit"]} if "commit" in facts else {}
    return tags | {f"version.{name}": version for name, version in versions().items()}


def _short(command: str) -> str:
    """Return a command without directories and keys: MLflow shows what follows the last slash."""
    return " ".join(Path(word).name for word in command.split() if "=" not in word)


def _cut(text: str, most: int = MAX_VALUE_CHARACTERS) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _now() -> int:
    return int(time.time() * 1000)
