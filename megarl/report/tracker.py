"""Keeps RUN_DIR/report.html up to date during a run: after every validation, and at the end."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megarl.report.read import RunReader
from megarl.tracking.names import Ending
from megarl.tracking.protocol import NullTracker, Row

REPORT_FILE = "report.html"
HELD_OUT = "val"  # the first part of the names of all metrics of a validation, before a - or /


class ReportTracker(NullTracker):
    """A tracker that writes the report from the files of the run, which other trackers have written before.

    A thread writes it while training continues. It reads only the lines that are new since the last report. A
    validation that ends while a report is being written waits for the next one.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / REPORT_FILE
        self._reader = RunReader(run_dir)
        self._thread = ThreadPoolExecutor(1, "megarl-report")
        self._report: Future[None] | None = None

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Start to write the report if the step was validated. Raises what the last report raised."""
        is_validated = any(name.startswith((f"{HELD_OUT}/", f"{HELD_OUT}-")) for name in metrics)
        last = self._report
        if is_validated and (last is None or last.done()):
            self._report = self._thread.submit(self._write)
            if last is not None:
                last.result()

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Write the last report."""
        self._report = self._thread.submit(self._write)
        self._thread.shutdown()
        self._report.result()

    def _write(self) -> None:
        from megarl.report.page import write_report  # only the rank that tracks needs jinja2

        write_report([self._reader.read()], self._file)
