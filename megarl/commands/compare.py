"""Show runs next to each other: `megarl compare RUN_DIR RUN_DIR ...`. Needs nothing but the files of the runs."""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

from rich.table import Table

from megarl.commands.cli.command import parse, print_error
from megarl.commands.cli.table import COMPARE
from megarl.config.links import shown
from megarl.platform.errors import UserError
from megarl.platform.screen import Screen
from megarl.report.differences import between
from megarl.report.read import Points, Run, read_run
from megarl.report.summary import Score
from megarl.tracking.names import KL, LEARNT, REWARD, STEP_SECONDS, VALIDATION

SCORES = (REWARD, *(f"{prefix}*" for prefix in VALIDATION), *LEARNT)
"""Metrics that have a best value: a loss the smallest, another the greatest."""
HEADLINES = (*SCORES, *KL, "response_length/mean")

Facts = Mapping[str, Any]
"""Numbers of a run, or of a curve."""


def main(argv: Sequence[str]) -> int:
    """Print the comparison; return 1 if a directory is not that of a run."""
    typed = parse(COMPARE, argv)
    try:
        found = [read_run(run_dir) for run_dir in typed["runs"]]
    except UserError as error:
        print_error(error)
        return 1
    runs = [_facts(run, (*HEADLINES, *typed["metric"])) for run in found]
    differing = between([run.config for run in found])
    if typed["as_json"]:
        print(json.dumps({"runs": runs, "differences": differing}))
    else:
        show(runs, differing, Screen())
    return 0


def show(runs: Sequence[Facts], differing: Mapping[str, Sequence[object]], console: Screen) -> None:
    """Print metrics and times, and the differences of the configurations."""
    table = _table("first -> last (best at step)", runs)
    for name in dict.fromkeys(name for run in runs for name in run["metrics"]):
        table.add_row(name, *(_cell(run["metrics"].get(name)) for run in runs))
    table.add_section()
    table.add_row("finished steps", *(str(run["steps"]) for run in runs))
    table.add_row("seconds in steps", *(f"{run['seconds']:.0f}" for run in runs))
    table.add_row("seconds of a step, median", *(f"{run['seconds_per_step'] or 0:.3g}" for run in runs))
    console.print(table)
    if not differing:
        console.print("no key that all runs have differs in the configurations")
        return
    table = _table("configuration", runs)
    for key, values in differing.items():
        table.add_row(key, *(shown(value) for value in values))
    console.print(table)


def _table(title: str, runs: Sequence[Facts]) -> Table:
    table = Table()
    for name in (title, *(run["name"] for run in runs)):
        table.add_column(name, overflow="fold")  # a key or a path that is cut cannot be read
    return table


def _cell(curve: Facts | None) -> str:
    if curve is None:
        return "-"
    best = "" if curve["best"] is None else f" ({curve['best']:.4g} at {curve['best_step']})"
    return f"{curve['first']:.4g} -> {curve['last']:.4g}{best}"


def _facts(run: Run, patterns: Sequence[str]) -> Facts:
    """Return a run in numbers: `seconds_per_step` is the median."""
    seconds = [value for _, value in run.points(STEP_SECONDS)]
    curves = {name: run.points(name) for name in run.names() if _is_wanted(patterns, name)}
    return {
        "name": str(run.directory),
        "steps": run.last_step,
        "seconds": sum(seconds),
        "seconds_per_step": median(seconds) if seconds else None,
        "metrics": {name: _curve(name, points) for name, points in curves.items() if points},
    }


def _curve(name: str, points: Points) -> Facts:
    score = Score(title=name, points=points, lower_is_better="loss" in name)
    best_step, best = score.best if _is_wanted(SCORES, name) else (None, None)
    return {"first": score.first, "last": score.last, "best": best, "best_step": best_step}


def _is_wanted(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
