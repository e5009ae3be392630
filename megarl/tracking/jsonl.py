"""Metrics and tables as files of JSON lines in the run's directory; a line is in its file when `log` returns.

Every run has these files. Trackers of servers read from them what a server lacks. If the disk accepts no lines,
training continues, and the lines follow as soon as the disk accepts them.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path

from megarl.tracking.lines import Lines, has_step, read_lines
from megarl.tracking.names import Ending
from megarl.tracking.protocol import Row
from megarl.tracking.samples import GENERATIONS

METRICS_FILE = "metrics.jsonl"
TABLES = (GENERATIONS, "data/prompts")
BATCH = 100  # lines that are read at a time
_LATEST = 2.5e11  # Unix seconds: the year 9892, before the last that a date can have


class Jsonl:
    """`metrics.jsonl` has one object per `log`: `step`, `time` (Unix seconds) and the metrics.

    A table `val/generations` becomes `val_generations.jsonl`, one object per row. A resume removes the lines of
    steps after `resume_step`, because those steps run again, and adds `resume_metrics` as the line of `resume_step` if
    that line is missing. `reached` is the last step that had a line before.
    """

    def __init__(
        self, run_dir: Path, *, resume_step: int | None = None, resume_metrics: Mapping[str, float] | None = None
    ) -> None:
        self._run_dir = run_dir
        self._resume_step = resume_step
        self.metrics, steps = self._open(METRICS_FILE)
        self.reached = max(steps, default=-1)
        self.tables = {name: self._open(table_file(name))[0] for name in TABLES}
        if resume_step is not None and resume_metrics and resume_step not in steps:
            self.log(resume_metrics, step=resume_step)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one line."""
        self.metrics.append([{"step": step, "time": time.time(), **metrics}])

    def log_table(self, name: str, rows: Sequence[Row], *, step: int) -> None:
        """Append one line per row to the table's file."""
        if name not in self.tables:
            self.tables[name] = self._open(table_file(name))[0]
        self.tables[name].append({"step": step, **row} for row in rows)

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Try once more to write lines that the disk did not accept."""
        for file in (self.metrics, *self.tables.values()):
            file.close()

    def _open(self, name: str) -> tuple[Lines, set[int]]:
        """Return a file without its lines of later steps, and the steps of all lines that it had."""
        lines = Lines(self._run_dir / name)
        return lines, lines.cut(self._resume_step)


class Unread:
    """The lines of a run's files that a tracker of a server has not taken yet, from the first line on.

    Lines count as taken if the tracker asks for the next ones. Another thread may append lines.
    """

    def __init__(self, records: Jsonl) -> None:
        self._records = records
        self._places = Counter[str]()  # file or table -> bytes that are taken

    def metrics(self) -> Iterator[list[Row]]:
        """Yield lines of metrics, several at a time."""
        lines = self._records.metrics.after(self._places[METRICS_FILE])
        while found := list(islice(lines, BATCH)):
            yield [row for row, _ in found]
            self._places[METRICS_FILE] = found[-1][1]

    def tables(self) -> Iterator[tuple[str, list[Row]]]:
        """Yield the name of a table and its rows of a step."""
        for name, file in list(self._records.tables.items()):
            for _, lines in groupby(file.after(self._places[name]), key=lambda line: line[0]["step"]):
                found = list(lines)
                yield name, [row for row, _ in found]
                self._places[name] = found[-1][1]


def table_file(name: str) -> str:
    """Return the name of the file of a table."""
    return f"{name.replace('/', '_')}.jsonl"


def values_of(row: Row) -> dict[str, float]:
    """Return the metrics of a line, without its step and time."""
    return {k: value for k, value in row.items() if k not in ("step", "time") and isinstance(value, int | float)}


def time_of(row: Row) -> float:
    """Return the time of a line in Unix seconds; 0 if it has none, as a line of another program may."""
    seconds = row.get("time")
    return float(seconds) if isinstance(seconds, int | float) and 0 <= seconds <= _LATEST else 0.0


def read_jsonl(path: str | Path) -> list[Row]:
    """Return the objects of a file that have a step, without damaged lines."""
    return [row for row, _ in read_lines(Path(path)) if row and has_step(row)]
