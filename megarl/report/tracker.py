"""Keeps RUN_DIR/report.html up to date during a run: after every validation, and at the end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.tracking.names import Ending
from megarl.tracking.protocol import NullTracker

REPORT_FILE = "report.html"
HELD_OUT = "val"  # the first part of the names of all metrics of a validation, before a - or /


class ReportTracker(NullTracker):
    """A tracker that writes the report from the files of the run, which other trackers have written before."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write the report if the step was validated."""
        if any(name.startswith((f"{HELD_OUT}/", f"{HELD_OUT}-")) for name in metrics):
            self._write()

    def close(self, summary_rows: Sequence[Mapping[str, Any]] = (), *, ending: Ending = "finished") -> None:
        """Write the last report."""
        self._write()

    def _write(self) -> None:
        from megarl.report.page import write_report  # only the rank that tracks needs jinja2
        from megarl.report.read import read_run

        write_report([read_run(self._run_dir)], self._run_dir / REPORT_FILE)
