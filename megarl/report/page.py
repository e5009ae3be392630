"""The page: one HTML file with its data, its style and the library that draws, so that it opens without a network."""

import base64
import gzip
import importlib.resources
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

from megarl.platform.files import write_whole
from megarl.report.browser import BROWSER_FILE
from megarl.report.charts import figures
from megarl.report.differences import between, from_default
from megarl.report.read import Run
from megarl.report.summary import faults, notes, score_of, summary
from megarl.report.templates import template
from megarl.tracking.jsonl import time_of
from megarl.tracking.names import PHASES, STEP_SECONDS, TIMING, phases_of, titled
from megarl.tracking.protocol import Row
from megarl.tracking.samples import Pair, pairs

MOST_SAMPLES = 6  # in each direction


def write_report(runs: Sequence[Run], path: Path) -> None:
    """Write the report of a run, or of several side by side, completely or not at all. OSError if the disk refuses."""
    has_browser = len(runs) == 1 and (path.parent / BROWSER_FILE).is_file()
    write_whole(path, render(runs, browser=BROWSER_FILE if has_browser else None).encode(errors="replace"))


def render(runs: Sequence[Run], *, browser: str | None = None) -> str:
    """Return the page, with a link to the page of all samples if there is one."""
    return template("page.html").render(
        title=", ".join(run.name for run in runs),
        written=f"{datetime.now():%Y-%m-%d %H:%M}",
        runs=[_summary(run) for run in runs],
        figures=json.dumps(list(figures(runs))).replace("<", "\\u003c"),  # no text can end the script
        single=_single(runs[0]) if len(runs) == 1 else None,
        compared=between([run.config for run in runs]) if len(runs) > 1 else {},
        browser=browser,
        library=library(),
    )


def _single(run: Run) -> dict[str, object]:
    """Return what the page shows of a run only if there is no other."""
    better, worse = _changes(run)
    return {
        "better": better,
        "worse": worse,
        "phases": list(_phases(run)),
        "differences": list(from_default(run.config)),
        "history": [_event(row) for row in run.history],
        "versions": _versions(run),
    }


@cache
def library() -> str:
    """Return plotly.js, compressed: as text, 1.9 MB instead of 4.8 MB."""
    source = (importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(source, mtime=0)).decode()


def _ending(run: Run) -> str:
    """Return how the run ended, as far as its history says; the latest event may be a start."""
    event = str(run.history[-1].get("event", "")) if run.history else ""
    return "not finished" if event in ("start", "resume") else event


def _summary(run: Run) -> dict[str, object]:
    score = score_of(run)
    seconds = sum(value for _, value in run.points(STEP_SECONDS))
    return {
        "name": run.name,
        "directory": str(run.directory.resolve()),
        "summary": summary(run),
        "ending": _ending(run),
        "is_better": bool(score and score.is_better and not score.is_same),
        "is_worse": bool(score and not score.is_better and not score.is_same),
        "notes": list(notes(run)),
        "faults": list(faults(run)),
        "score": score,
        "steps": run.last_step,
        "time": f"{timedelta(seconds=round(seconds))}" if seconds else "",
    }


def _changes(run: Run) -> tuple[list[Pair], list[Pair]]:
    """Return the samples that improved most from the first to the last validation, and those that got worst."""
    if len(run.samples) < 2:
        return [], []
    found = pairs(run.samples[min(run.samples)], run.samples[max(run.samples)])
    by_change = sorted(found, key=lambda pair: pair.change)
    better = [pair for pair in reversed(by_change) if pair.change > 0]
    return better[:MOST_SAMPLES], [pair for pair in by_change if pair.change < 0][:MOST_SAMPLES]


def _phases(run: Run) -> Iterator[dict[str, str]]:
    """Yield the phases with their time over all steps, the longest first."""
    total = sum(value for _, value in run.points(STEP_SECONDS))
    sums = {name: sum(value for _, value in run.points(name)) for name in run.names() if name.startswith(TIMING)}
    for phase, seconds in phases_of(sums):
        share = f"{seconds / total:.0%}" if total else ""
        meaning = "the whole step" if phase == "step" else PHASES.get(phase, "")
        yield {"phase": titled(phase), "meaning": meaning, "seconds": f"{seconds:,.1f}", "share": share}


def _event(row: Row) -> dict[str, str]:
    seconds = time_of(row)
    when = f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}" if seconds else ""
    facts = {key: str(row.get(key, "")) for key in ("event", "step", "host", "user", "commit", "command")}
    return facts | {"time": when}


def _versions(run: Run) -> Mapping[str, str]:
    """Return the versions of the newest process of the run."""
    for row in reversed(run.history):
        versions = row.get("versions")
        if isinstance(versions, dict):
            return versions
    return {}
