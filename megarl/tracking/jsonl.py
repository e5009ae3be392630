"""Metrics and tables as files of JSON lines in the run's directory; a line is in its file when `log` returns.

If the disk accepts no lines, training continues, and the lines follow as soon as the disk accepts them.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.tracking.lines import Lines, Row, read_lines
from megarl.tracking.names import Ending

METRICS_FILE = "metrics.jsonl"


class Jsonl:
    """`metrics.jsonl` has one object per `log`: `step`, `time` (Unix seconds) and the metrics.

    A table `val/generations` becomes `val_generations.jsonl`, one object per row. A resume removes the lines of
    steps after `resume_step`, because those steps run again, and adds `resume_metrics` as the line of `resume_step` if
    that line is missing.
    """

    def __init__(
        self, run_dir: Path, *, resume_step: int | None = None, resume_metrics: Mapping[str, float] | None = None
    ) -> None:
        self._run_dir = run_dir
        self._resume_step = -1 if resume_step is None else resume_step
        self._files: dict[str, Lines] = {}
        self._steps: dict[str, set[int]] = {}  # file -> steps whose lines it keeps
        self._file(METRICS_FILE)
        if resume_step is not None and resume_metrics and resume_step not in self._steps[METRICS_FILE]:
            self.log(resume_metrics, step=resume_step)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one line."""
        self._file(METRICS_FILE).append([{"step": step, "time": time.time(), **metrics}])

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Append one line per row to the table's file."""
        self._file(table_file(name)).append({"step": step, **row} for row in rows)

    def close(self, summary_rows: Sequence[Mapping[str, Any]] = (), *, ending: Ending = "finished") -> None:
        """Try once more to write lines that the disk did not accept."""
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> Lines:
        if name not in self._files:
            steps = self._steps[name] = set[int]()

            def keep(row: Row) -> bool:
                if is_kept := row["step"] <= self._resume_step:
                    steps.add(row["step"])
                return is_kept

            self._files[name] = Lines(self._run_dir / name, has_step)
            self._files[name].cut(keep)
        return self._files[name]


def table_file(name: str) -> str:
    """Return the name of the file of a table."""
    return f"{name.replace('/', '_')}.jsonl"


def has_step(row: Row) -> bool:
    """Return whether a JSON object has a step."""
    return type(row.get("step")) is int  # a boolean is an integer too


def read_jsonl(path: str | Path) -> list[Row]:
    """Return the objects of a file that have a step, without damaged lines."""
    return [row for row, _ in read_lines(Path(path), has_step) if row is not None]
