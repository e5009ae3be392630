"""Metrics and tables as files of JSON lines in the run's directory; a line is in its file when `log` returns."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.tracking.names import Ending

METRICS_FILE = "metrics.jsonl"


class Jsonl:
    """`metrics.jsonl` has one object per `log`: `step`, `time` (Unix seconds) and the metrics.

    A table `val/generations` becomes `val_generations.jsonl`, one object per row. After a resume the lines of steps
    later than `resume_step` go, because those steps are run again, and `resume_metrics` become the line of that step
    where it has none.
    """

    def __init__(
        self, run_dir: Path, *, resume_step: int | None = None, resume_metrics: Mapping[str, float] | None = None
    ) -> None:
        self._run_dir = run_dir
        self._resume_step = -1 if resume_step is None else resume_step
        self._trimmed: set[Path] = set()
        path = run_dir / METRICS_FILE
        self._trim(path)
        kept = {row["step"] for row in read_jsonl(path)} if path.exists() else set()
        if resume_step is not None and resume_metrics and resume_step not in kept:
            self.log(resume_metrics, step=resume_step)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one line."""
        self._append(self._run_dir / METRICS_FILE, [{"step": step, "time": time.time(), **metrics}])

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Append one line per row to the table's file."""
        path = self._run_dir / f"{name.replace('/', '_')}.jsonl"
        self._trim(path)
        self._append(path, [{"step": step, **row} for row in rows])

    def close(self, summary_rows: Sequence[Mapping[str, Any]] = (), *, ending: Ending = "finished") -> None:
        """Do nothing: every line is written."""

    def _append(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)

    def _trim(self, path: Path) -> None:
        if path in self._trimmed:
            return
        self._trimmed.add(path)
        if path.exists():
            kept = path.with_suffix(".kept")  # a crash in between must not cost the lines that stay
            kept.unlink(missing_ok=True)
            self._append(kept, [row for row in read_jsonl(path) if row["step"] <= self._resume_step])
            kept.replace(path)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file; a last line that a crash cut short is left out."""
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
