"""Weights & Biases: the run's configuration, its metrics by step, and its tables.

The records of a process stay in a file of the run's directory until the process has finished its part of the run,
because W&B writes its own file late, and a killed process would lose them. The next process that resumes the run in the
directory sends them first.
"""

import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.platform.errors import UserError
from megarl.platform.files import write_whole
from megarl.platform.safe_names import wandb_key, wandb_project
from megarl.tracking.names import Ending
from megarl.tracking.outbox import Outbox, Record
from megarl.tracking.run import TrackedRun
from megarl.tracking.run_id import WANDB_RUN_ID_FILE, known_run_id

logger = logging.getLogger(__name__)

UNFINISHED_FILE = "wandb_unfinished.jsonl"
START_S = 30.0  # wait at the start for a server
CLOSE_S = 120.0  # wait at the end until all is uploaded
QUIET = {  # read when wandb is imported
    "WANDB_ERROR_REPORTING": "false",  # its crashes are not sent to its makers
}


class Wandb:
    """One run: online if WANDB_API_KEY or WANDB_MODE asks for it and a server responds, else in `run_dir/wandb`.

    With a `resume_step` the run whose id is in `run_dir` continues, and steps that it has are not sent twice. If it has
    later steps that will get other numbers (`same_curve` is False), a new run begins, because W&B cannot remove steps.
    `wandb sync --append` uploads a part that was recorded offline, and records that a server did not accept within
    `CLOSE_S`. UserError if W&B cannot record offline, either.
    """

    def __init__(self, run: TrackedRun) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import wandb  # takes a second, and only one rank needs it

        self._library = wandb
        self._run_dir = run.run_dir
        self._outbox = Outbox(run.run_dir / UNFINISHED_FILE)
        self._finished = -1  # the last step of the parts of the run that were finished
        run_id = self._run_id(run.resume_step, run.same_curve)
        for record in self._outbox.records():  # of killed processes: their offline parts are replaced
            if record["kind"] == "part":
                shutil.rmtree(record["directory"], ignore_errors=True)
        self._run = self._begin(run_id, run)
        write_whole(run.run_dir / WANDB_RUN_ID_FILE, run_id.encode())
        unfinished = [record for record in self._outbox.records() if record["kind"] != "part"]
        if self._run.offline:
            self._outbox.put({"kind": "part", "directory": str(Path(self._run.dir).parent)})
        self._last = self._finished
        for record in unfinished:
            self._send(record)
        if run.resume_step is not None and run.resume_metrics and self._last < run.resume_step:
            self.log(run.resume_metrics, step=run.resume_step)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step."""
        values = {wandb_key(name): value for name, value in metrics.items()}
        self._record({"kind": "metrics", "step": step, "time": time.time(), "values": values})

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Record the rows as the table `name` of that step."""
        if rows:
            content = [[_cell(value) for value in row.values()] for row in rows]
            self._record(
                {"kind": "table", "step": step, "name": wandb_key(name), "columns": list(rows[0]), "rows": content}
            )

    def close(self, summary_rows: Sequence[Mapping[str, Any]] = (), *, ending: Ending = "finished") -> None:
        """Finish this part of the run, record how it ended, and wait at most CLOSE_S for uploads."""
        for row in summary_rows:
            self._run.summary.update({key: _cell(value) for key, value in row.items()})
        if ending == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ending == "finished" else 1)
        # W&B's file is complete only when W&B's own process has ended.
        ending_process = threading.Thread(target=self._library.teardown, name="wandb", daemon=True)
        ending_process.start()
        ending_process.join(CLOSE_S)
        if ending_process.is_alive():
            logger.warning("W&B did not upload all records: they are in %s", self._run_dir / "wandb")
        else:
            self._outbox.cut(lambda record: False)
            self._outbox.put({"kind": "finished", "step": self._last})
        self._outbox.close()

    def _run_id(self, resume_step: int | None, same_curve: bool) -> str:
        """Return the id of the run to continue, or a new id, and drop records of steps that will run again."""
        known = known_run_id(self._run_dir / WANDB_RUN_ID_FILE)
        if resume_step is None or known is None:
            self._outbox.cut(lambda record: False)
            return uuid.uuid4().hex[:8]
        run_id, kept = known, list(self._outbox.records())
        if not same_curve and max((record.get("step", -1) for record in kept), default=-1) > resume_step:
            logger.warning("the W&B run %s has steps after %d that will differ, a new one begins", run_id, resume_step)
            run_id, kept = uuid.uuid4().hex[:8], [record for record in kept if record["kind"] != "finished"]
        self._outbox.cut(lambda record: False)
        for record in kept:
            if record["kind"] == "finished":
                self._finished = record["step"]
            if record["kind"] in ("finished", "part") or record["step"] <= resume_step:
                self._outbox.put(record)
        return run_id

    def _begin(self, run_id: str, run: TrackedRun) -> Any:
        has_key = bool(os.environ.get("WANDB_API_KEY"))
        mode = os.environ.get("WANDB_MODE", "online" if has_key else "offline")
        options: dict[str, Any] = {
            "project": wandb_project(run.project),
            "name": run.experiment,
            "id": run_id,
            "config": dict(run.params),
        }
        if mode == "online":
            try:
                return self._library.init(**options, resume="allow", settings=self._settings(mode))
            except Exception as error:  # errors of the client differ, and the run needs no server
                logger.warning("W&B does not respond, its records are kept in %s: %s", self._run_dir / "wandb", error)
                self._library.teardown()  # its process still holds the run that it could not open
        else:
            logger.warning("W&B records offline in %s; `wandb sync --append` uploads it", self._run_dir / "wandb")
        try:
            return self._library.init(**options, settings=self._settings("offline"))
        except Exception as error:
            raise UserError(f"trainer.logger: wandb cannot record in {self._run_dir}: {error}") from error

    def _settings(self, mode: str) -> Any:
        """Return settings under which W&B records nothing about the process, its arguments or its host."""
        return self._library.Settings(
            mode=mode,
            root_dir=str(self._run_dir),
            init_timeout=START_S,
            finish_timeout=CLOSE_S,
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )

    def _record(self, record: Record) -> None:
        self._outbox.put(record)
        self._send(record)

    def _send(self, record: Record) -> None:
        """Send a record to W&B, unless the run has its step."""
        step = record["step"]
        if record["kind"] == "finished" or step <= self._finished or step < self._run.starting_step:
            return
        if record["kind"] == "metrics":
            self._run.log(record["values"] | {"_timestamp": record["time"]}, step=step)
        else:
            table = self._library.Table(columns=record["columns"], data=record["rows"], allow_mixed_types=True)
            self._run.log({record["name"]: table}, step=step)
        self._last = max(self._last, step)


def _cell(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
