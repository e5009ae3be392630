"""Show runs next to each other: `megarl compare RUN_DIR RUN_DIR ...`. Needs nothing but the files of the runs."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.commands.cli.command import parse, print_error
from megarl.commands.cli.table import COMPARE
from megarl.config.unread import shown
from megarl.platform.errors import UserError
from megarl.platform.screen import Screen
from megarl.platform.secrets import guard_output
from megarl.report.differences import between
from megarl.report.read import Run, read_run
from megarl.tracking.names import KL, LEARNT, REWARD, STEP_SECONDS, VALIDATION

HEADLINES = (REWARD, *(f"{prefix}*" for prefix in VALIDATION), *LEARNT, *KL, "response_length/mean")
SCORES = (REWARD, *(f"{prefix}*" for prefix in VALIDATION), *LEARNT)
"""Metrics that have a best value: a loss the smallest, another the greatest."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """The values of a metric in a run."""

    first: float
    last: float
    best: float | None = None  # only of a score or a loss
    best_step: int | None = None

    @classmethod
    def of(cls, name: str, points: Sequence[tuple[int, float]]) -> "Series":
        """Summarise `(step, value)` in their order."""
        summary = cls(first=points[0][1], last=points[-1][1])
        if not _is_wanted(SCORES, name):
            return summary
        step, best = (min if "loss" in name else max)(points, key=lambda point: point[1])
        return replace(summary, best=best, best_step=step)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in numbers."""

    name: str
    steps: int  # finished
    seconds: float  # in steps
    seconds_per_step: float | None  # the median
    metrics: Mapping[str, Series]
    config: Mapping[str, Any]

    @classmethod
    def read(cls, run_dir: Path, patterns: Sequence[str]) -> "Summary":
        """Read a run's directory. Raises UserError if it has no metrics."""
        run = read_run(run_dir)
        seconds = [value for _, value in run.points(STEP_SECONDS)]
        return cls(
            name=str(run_dir),
            steps=run.last_step,
            seconds=sum(seconds),
            seconds_per_step=median(seconds) if seconds else None,
            metrics=_series(run, patterns),
            config=run.config,
        )


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Print the comparison; return 1 if a directory is not that of a run."""
    typed = parse(COMPARE, argv)
    try:
        runs = [Summary.read(run_dir, (*HEADLINES, *typed["metric"])) for run_dir in typed["runs"]]
    except UserError as error:
        print_error(error)
        return 1
    if typed["as_json"]:
        found = [asdict(run) | {"config": None} for run in runs]
        print(json.dumps({"runs": found, "differences": between([run.config for run in runs])}))
        return 0
    show(runs, Screen())
    return 0


def show(runs: Sequence[Summary], console: Screen) -> None:
    """Print metrics and times, and the differences of the configurations."""
    table = _table("first -> last (best at step)", runs)
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        table.add_row(name, *(_cell(run.metrics.get(name)) for run in runs))
    table.add_section()
    table.add_row("finished steps", *(str(run.steps) for run in runs))
    table.add_row("seconds in steps", *(f"{run.seconds:.0f}" for run in runs))
    table.add_row("seconds of a step, median", *(f"{run.seconds_per_step or 0:.3g}" for run in runs))
    console.print(table)
    differing = between([run.config for run in runs])
    if not differing:
        console.print("no key that all runs have differs in the configurations")
        return
    table = _table("configuration", runs)
    for key, values in differing.items():
        table.add_row(key, *(shown(value) for value in values))
    console.print(table)


def _table(title: str, runs: Sequence[Summary]) -> Table:
    table = Table()
    for name in (title, *(run.name for run in runs)):
        table.add_column(name, overflow="fold")  # a key or a path that is cut cannot be read
    return table


def _cell(series: Series | None) -> str:
    if series is None:
        return "-"
    best = "" if series.best is None else f" ({series.best:.4g} at {series.best_step})"
    return f"{series.first:.4g} -> {series.last:.4g}{best}"


def _series(run: Run, patterns: Sequence[str]) -> dict[str, Series]:
    points = {name: run.points(name) for name in run.names() if _is_wanted(patterns, name)}
    return {name: Series.of(name, found) for name, found in points.items() if found}


def _is_wanted(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


if __name__ == "__main__":
    guard_output()
    sys.exit(main())
