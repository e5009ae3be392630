"""Show runs next to each other: `megarl compare RUN_DIR RUN_DIR ...`. Needs nothing but the files of the runs."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.cli.command import parse
from megarl.cli.commands import COMPARE
from megarl.config.unread import shown
from megarl.platform.secrets import guard_output, redact
from megarl.report.read import Run, read_run
from megarl.section import flatten
from megarl.tracking.names import KL, LEARNT, REWARD, STEP_SECONDS, VALIDATION

HEADLINES = (REWARD, *(f"{prefix}*" for prefix in VALIDATION), *LEARNT, *KL, "response_length/mean")
OWN_KEYS = ("trainer.default_local_dir", "trainer.experiment_name")
"""Keys that name a run, and differ anyway."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """The values of a metric in a run."""

    first: float
    last: float
    best: float
    best_step: int

    @classmethod
    def of(cls, name: str, points: Sequence[tuple[int, float]]) -> "Series":
        """Summarise `(step, value)` in their order; the best loss or divergence is the smallest value."""
        is_cost = "loss" in name or name in KL
        step, best = (min if is_cost else max)(points, key=lambda point: point[1])
        return cls(first=points[0][1], last=points[-1][1], best=best, best_step=step)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in numbers."""

    name: str
    steps: int  # finished
    seconds: float  # in steps
    seconds_per_step: float | None  # the median
    metrics: Mapping[str, Series]
    config: Mapping[str, Any]  # by dotted key

    @classmethod
    def read(cls, run_dir: Path, patterns: Sequence[str]) -> "Summary":
        """Read a run's directory. Raises ValueError if it has no metrics."""
        run = read_run(run_dir)
        seconds = [value for _, value in run.points(STEP_SECONDS)]
        return cls(
            name=str(run_dir),
            steps=run.last_step,
            seconds=sum(seconds),
            seconds_per_step=median(seconds) if seconds else None,
            metrics=_series(run, patterns),
            config=dict(flatten(run.config)),
        )


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Print the comparison; return 1 if a directory is not that of a run."""
    typed = parse(COMPARE, argv)
    try:
        runs = [Summary.read(run_dir, (*HEADLINES, *typed["metric"])) for run_dir in typed["runs"]]
    except ValueError as error:
        print(redact(f"megarl: {error}"), file=sys.stderr)
        return 1
    if typed["as_json"]:
        found = [asdict(run) | {"config": None} for run in runs]
        print(json.dumps({"runs": found, "differences": differences(runs)}))
        return 0
    show(runs, Console())
    return 0


def differences(runs: Sequence[Summary]) -> dict[str, list[Any]]:
    """Return the values, run by run, of each key that differs between runs; None if a run has no such key."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    values = {key: [run.config.get(key) for run in runs] for key in keys if key not in OWN_KEYS}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def show(runs: Sequence[Summary], console: Console) -> None:
    """Print metrics and times, and the differences of the configurations."""
    table = Table("first -> last (best at step)", *(run.name for run in runs))
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        table.add_row(name, *(_cell(run.metrics.get(name)) for run in runs))
    table.add_section()
    table.add_row("finished steps", *(str(run.steps) for run in runs))
    table.add_row("seconds in steps", *(f"{run.seconds:.0f}" for run in runs))
    table.add_row("seconds of a step, median", *(f"{run.seconds_per_step or 0:.3g}" for run in runs))
    console.print(table)
    differing = differences(runs)
    if not differing:
        console.print("no difference in the configurations")
        return
    table = Table("configuration", *(run.name for run in runs))
    for key, values in differing.items():
        table.add_row(key, *(shown(value) for value in values))
    console.print(table)


def _cell(series: Series | None) -> str:
    if series is None:
        return "-"
    return f"{series.first:.4g} -> {series.last:.4g} ({series.best:.4g} at {series.best_step})"


def _series(run: Run, patterns: Sequence[str]) -> dict[str, Series]:
    points = {name: run.points(name) for name in run.names() if _is_wanted(patterns, name)}
    return {name: Series.of(name, found) for name, found in points.items() if found}


def _is_wanted(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


if __name__ == "__main__":
    guard_output()
    sys.exit(main())
