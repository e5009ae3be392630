"""Weights & Biases: the run's configuration, its metrics by step, and its tables.

W&B writes its own file late, and a killed process would lose what it logged. So the next process that resumes the run
in the directory first sends what the files of the run have and no finished process has sent.
"""

import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.platform.errors import UserError
from megarl.platform.files import write_whole
from megarl.platform.safe_names import wandb_key, wandb_project
from megarl.tracking.jsonl import Jsonl, Unread, time_of, values_of
from megarl.tracking.lines import read_lines
from megarl.tracking.names import Ending
from megarl.tracking.protocol import Row
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

    def __init__(self, run: TrackedRun, records: Jsonl) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import wandb  # takes a second, and only one rank needs it

        self._library = wandb
        self._run_dir = run.run_dir
        self._unread = Unread(records)
        run_id, self._finished = self._continued(run, records.reached)
        self._last = self._finished
        self._run = self._begin(run_id, run)
        write_whole(run.run_dir / WANDB_RUN_ID_FILE, run_id.encode())
        self._note(part=Path(self._run.dir).parent.name if self._run.offline else None)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step."""
        self._send()

    def log_table(self, name: str, rows: Sequence[Row], *, step: int) -> None:
        """Record the rows as the table `name` of that step."""
        self._send()

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Finish this part of the run, record how it ended, and wait at most CLOSE_S for uploads."""
        try:
            self._send()
            for row in summary_rows:
                self._run.summary.update({key: _cell(value) for key, value in row.items()})
        finally:
            self._finish(ending)

    def _finish(self, ending: Ending) -> None:
        if ending == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ending == "finished" else 1)
        # W&B's file is complete only when W&B's own process has ended.
        if self._end_process(CLOSE_S):
            self._finished = self._last
            self._note(part=None)
        else:
            logger.warning("W&B did not upload all records: they are in %s", self._run_dir / "wandb")

    def _end_process(self, limit_s: float) -> bool:
        """Ask W&B's own process to end, and return whether it did so in time; without a server it may never do so."""
        ending = threading.Thread(target=self._library.teardown, name="wandb", daemon=True)
        ending.start()
        ending.join(limit_s)
        return not ending.is_alive()

    def _continued(self, run: TrackedRun, reached: int) -> tuple[str, int]:
        """Return the id of the run to continue, or a new id, and the last step that finished processes have sent.

        Remove the offline parts of killed processes, whose records are sent again. `reached` is the last step that any
        process has recorded.
        """
        run_id = None if run.resume_step is None else known_run_id(self._run_dir / WANDB_RUN_ID_FILE)
        if run.resume_step is None or run_id is None:
            return uuid.uuid4().hex[:8], -1
        path = self._run_dir / UNFINISHED_FILE
        finished = -1 if path.exists() else run.first_step - 1  # a directory without the file is new to the run
        for row, _ in read_lines(path) if path.exists() else ():
            kind = row and row.get("kind")
            if row and kind == "finished":
                finished = row["step"]
            elif row and kind == "part":
                shutil.rmtree(self._run_dir / "wandb" / Path(row["directory"]).name, ignore_errors=True)
        if not run.same_curve and max(finished, reached) > run.resume_step:
            logger.warning(
                "the W&B run %s has steps after %d that will differ, a new one begins", run_id, run.resume_step
            )
            return uuid.uuid4().hex[:8], min(finished, run.first_step - 1)
        return run_id, finished

    def _note(self, *, part: str | None) -> None:
        """Write the last step of finished processes, and the offline part of this process."""
        rows: list[Row] = [{"kind": "finished", "step": self._finished}]
        if part:
            rows.append({"kind": "part", "directory": part})
        lines = [f"{json.dumps(row)}\n" for row in rows]
        write_whole(self._run_dir / UNFINISHED_FILE, "".join(lines).encode())

    def _begin(self, run_id: str, run: TrackedRun) -> Any:
        mode = os.environ.get("WANDB_MODE") or ("online" if self._has_login() else "offline")
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
                self._end_process(START_S)  # it still holds the run that it could not open
        else:
            logger.warning("W&B records offline in %s; `wandb sync --append` uploads it", self._run_dir / "wandb")
        try:
            return self._library.init(**options, settings=self._settings("offline"))
        except Exception as error:
            raise UserError(f"trainer.logger: wandb cannot record in {self._run_dir}: {error}") from error

    def _has_login(self) -> bool:
        """Return whether W&B knows a key: of the environment, or from `wandb login`."""
        try:
            return bool(self._library.api.api_key)
        except Exception as error:  # errors of the client differ, and the run needs no server
            logger.warning("W&B's login cannot be read: %s", error)
            return False

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

    def _send(self) -> None:
        """Send what the files of the run have and the W&B run has not, in the order of the steps, as W&B wants it.

        Raises the first error after the last row, so that a row that W&B refuses costs no other.
        """
        found = list(self._unread.tables())
        for rows in self._unread.metrics():
            found += [("", [row]) for row in rows]
        errors = list[Exception]()
        for name, rows in sorted(found, key=lambda each: each[1][0]["step"]):
            step = rows[0]["step"]
            if step > self._finished and step >= self._run.starting_step:
                try:
                    self._run.log(self._table(name, rows) if name else _metrics(rows[0]), step=step)
                except Exception as error:  # errors of the client differ
                    errors.append(error)
                else:
                    self._last = max(self._last, step)
        if errors:
            raise errors[0]

    def _table(self, name: str, rows: Sequence[Row]) -> dict[str, Any]:
        columns = [key for key in rows[0] if key != "step"]
        content = [[_cell(row.get(key)) for key in columns] for row in rows]
        return {wandb_key(name): self._library.Table(columns=columns, data=content, allow_mixed_types=True)}


def _metrics(row: Row) -> dict[str, float]:
    return {wandb_key(name): value for name, value in values_of(row).items()} | {"_timestamp": time_of(row)}


def _cell(value: object) -> Any:
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
