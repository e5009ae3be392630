"""The files of a run's directory, read into one record. Damaged or missing files leave their part empty."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.checkpoint.directory import CONFIG_FILE
from megarl.platform.errors import UserError
from megarl.tracking.history import HISTORY_FILE
from megarl.tracking.jsonl import METRICS_FILE, read_jsonl, table_file
from megarl.tracking.lines import Row
from megarl.tracking.samples import GENERATIONS, is_sample

Points = list[tuple[int, float]]
NONFINITE = "nonfinite"  # directory of the mini-batches that a run skipped


@dataclass(frozen=True, kw_only=True)
class Run:
    """The records of a run so far."""

    directory: Path
    rows: Sequence[Row]  # metrics, with `step` and `time`, by step
    samples: Mapping[int, Sequence[Row]]  # step -> responses of that validation
    config: Mapping[str, Any]  # nested; empty if there is no file
    history: Sequence[Row]  # starts, resumes and endings
    skips: Sequence[Row]  # updates that were skipped, as far as they are kept
    hangs: Sequence[str]  # directories with reports of hanging ranks

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.directory.resolve().name

    @property
    def last_step(self) -> int:
        """The last step that has metrics; 0 if there is none."""
        return max((row["step"] for row in self.rows), default=0)

    def points(self, name: str) -> Points:
        """Return the finite values of a metric by step."""
        return [
            (row["step"], row[name])
            for row in self.rows
            if isinstance(row.get(name), int | float) and math.isfinite(row[name])
        ]

    def names(self) -> list[str]:
        """Return the names of all metrics, in the order in which they first appear."""
        found = dict.fromkeys(name for row in self.rows for name in row)
        return [name for name in found if name not in ("step", "time")]


def read_run(directory: Path) -> Run:
    """Read a run's directory.

    Raises:
        UserError: no run has recorded anything in the directory.
    """
    if not any((directory / name).is_file() for name in (METRICS_FILE, HISTORY_FILE)):
        raise UserError(f"{directory} has no {METRICS_FILE}: name the directory of a run (trainer.default_local_dir)")
    samples: dict[int, list[Row]] = {}
    for row in filter(is_sample, _lines(directory / table_file(GENERATIONS))):
        samples.setdefault(row["step"], []).append(row)
    return Run(
        directory=directory,
        rows=read_curves(directory),
        samples=samples,
        config=read_mapping(directory / CONFIG_FILE, yaml.safe_load),
        history=_lines(directory / HISTORY_FILE),
        skips=[fact for path in sorted((directory / NONFINITE).glob("*.json")) if (fact := read_mapping(path))],
        hangs=sorted(path.name for path in directory.glob("hang-*")),
    )


def read_curves(directory: Path) -> list[Row]:
    """Return the metrics of a run with `step` and `time` (Unix seconds), by step; empty without a file of them."""
    return sorted(_lines(directory / METRICS_FILE), key=lambda row: row["step"])


def _lines(path: Path) -> list[Any]:
    try:
        return list(read_jsonl(path))
    except (OSError, ValueError):
        return []


def read_mapping(path: Path, parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """Return the mapping in a file; empty if the file is missing or damaged."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
