"""The files of a run's directory, read into one record. Damaged or missing files leave their part empty."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from megarl.checkpoint.directory import CONFIG_FILE
from megarl.platform.errors import UserError
from megarl.platform.log import LOG_DIRECTORY
from megarl.tracking.history import HISTORY_FILE
from megarl.tracking.jsonl import METRICS_FILE, read_jsonl, table_file
from megarl.tracking.lines import has_step, read_lines
from megarl.tracking.protocol import Row
from megarl.tracking.samples import GENERATIONS, is_sample

Points = list[tuple[int, float]]
NOTHING_YET = "nothing is recorded yet: the run starts, or ended before its first step"
NONFINITE = "nonfinite"  # directory of the mini-batches that a run skipped


@dataclass(frozen=True, kw_only=True)
class Run:
    """The records of a run so far."""

    directory: Path
    curves: Mapping[str, Points]  # the finite values of each metric, by step
    last_step: int  # that has metrics; 0 if there is none
    samples: Mapping[int, Sequence[Row]]  # step -> responses, for the first validation and the last
    config: Mapping[str, Any]  # nested; empty if there is no file
    history: Sequence[Row]  # starts, resumes and endings
    skips: Sequence[Row]  # updates that were skipped, as far as they are kept
    hangs: Sequence[str]  # directories with reports of hanging ranks

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.directory.resolve().name

    def points(self, name: str) -> Points:
        """Return the finite values of a metric by step."""
        return self.curves.get(name, [])

    def names(self) -> list[str]:
        """Return the names of all metrics, in the order in which they first appear."""
        return list(self.curves)


class RunReader:
    """Reads a run's directory repeatedly. Each time, it reads only what is new in the files that grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._places = Counter[str]()  # file -> bytes that have been read
        self._curves: dict[str, Points] = {}
        self._last_step = 0
        self._samples: dict[int, list[Row]] = {}

    def read(self) -> Run:
        """Return the records so far. The curves are those of the next call too, which extends them.

        Raises:
            UserError: no run has recorded anything in the directory.
        """
        directory = self._directory
        if not any((directory / name).is_file() for name in (METRICS_FILE, HISTORY_FILE)):
            if (directory / LOG_DIRECTORY).is_dir():
                raise UserError(f"{directory}: {NOTHING_YET}")
            raise UserError(
                f"{directory} has no {METRICS_FILE}: name the directory of a run (trainer.default_local_dir)"
            )
        for row in self._new_rows(METRICS_FILE):
            self._extend_curves(row)
        for row in filter(is_sample, self._new_rows(table_file(GENERATIONS))):
            self._samples.setdefault(row["step"], []).append(row)
        for step in sorted(self._samples)[1:-1]:
            del self._samples[step]
        skips = map(read_mapping, sorted((directory / NONFINITE).glob("*.json")))
        return Run(
            directory=directory,
            curves=self._curves,
            last_step=self._last_step,
            samples=self._samples,
            config=read_mapping(directory / CONFIG_FILE),
            history=_lines(directory / HISTORY_FILE),
            skips=[skip for skip in skips if skip],
            hangs=sorted(path.name for path in directory.glob("hang-*")),
        )

    def _new_rows(self, name: str) -> Iterator[Row]:
        """Yield the rows of a file that are new. A line that is being written is read the next time."""
        place = self._places[name]
        try:
            for row, num_bytes in read_lines(self._directory / name, start=place):
                place += num_bytes
                if row and has_step(row):
                    self._places[name] = place
                    yield row
        except (OSError, ValueError):
            return

    def _extend_curves(self, row: Row) -> None:
        step = row["step"]
        self._last_step = max(self._last_step, step)
        for name, value in row.items():
            if name in ("step", "time") or not isinstance(value, int | float) or not math.isfinite(value):
                continue
            points = self._curves.setdefault(name, [])
            points.append((step, value))
            if len(points) > 1 and points[-2][0] > step:
                points.sort(key=itemgetter(0))


def read_run(directory: Path) -> Run:
    """Read a run's directory once. Raises as `RunReader.read` does."""
    return RunReader(directory).read()


def read_curves(directory: Path) -> list[Row]:
    """Return the metrics of a run with `step` and `time` (Unix seconds), by step; empty without a file of them."""
    return sorted(_lines(directory / METRICS_FILE), key=lambda row: row["step"])


def _lines(path: Path) -> list[Row]:
    try:
        return read_jsonl(path)
    except (OSError, ValueError):
        return []


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, or in any other file as JSON; empty if the file is missing or damaged."""
    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
