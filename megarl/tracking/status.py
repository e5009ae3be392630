"""`status.json` in the run's directory: the step, the phase and its progress, for those who watch from elsewhere."""

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.platform import progress
from megarl.tracking.console import describe
from megarl.tracking.names import Ending
from megarl.tracking.protocol import NullTracker, Row

logger = logging.getLogger(__name__)

STATUS_FILE = "status.json"
INTERVAL_S = 2.0


class Status(NullTracker):
    """A tracker with a thread that replaces the file every `INTERVAL_S` seconds. Training never waits for it."""

    def __init__(self, run_dir: Path, *, total_steps: int, step: int = 0) -> None:
        self._path = run_dir / STATUS_FILE
        self._total_steps = total_steps
        self._step = step
        self._ended = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name="megarl-status", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Remember the step."""
        self._step = step

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Write how the run ended."""
        self._ended.set()
        self._thread.join()
        self._write(ending)

    def _work(self) -> None:
        while not self._ended.is_set():
            self._write("running")
            self._ended.wait(INTERVAL_S)

    def _write(self, state: str) -> None:
        phase = progress.now()
        status = {
            "time": time.time(),
            "state": state,
            "step": self._step,
            "total_steps": self._total_steps,
            "phase": describe(phase, time.monotonic()) if phase else "",
        }
        part = self._path.with_name(f".{self._path.name}.part")
        try:
            part.write_text(json.dumps(status), encoding="utf-8")
            part.replace(self._path)  # not forced to the disk: after a power cut nobody watches
        except OSError as error:
            if not self._has_failed:
                logger.warning("%s cannot be written, training continues: %s", self._path, error)
            self._has_failed = True
