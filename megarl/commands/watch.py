"""Watch a running job from another terminal: `megarl watch RUN_DIR`.

Shows the step and its phase, the curves of reward and KL, and a prompt's response at first and now. Reads the files of
the run, so it works on any machine that sees the directory, and after the run too. Without a terminal it shows the
state once.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megarl.commands.cli.command import parse
from megarl.commands.cli.table import WATCH
from megarl.platform.errors import UserError
from megarl.platform.log import LOG_DIRECTORY
from megarl.platform.screen import Screen, plain
from megarl.platform.terminal import visible
from megarl.report.charts import thin
from megarl.report.read import NOTHING_YET, Points, Run, read_mapping, read_run
from megarl.report.summary import score_of, summary
from megarl.tracking.names import KL, LEARNT, REWARD
from megarl.tracking.samples import Pair, pairs
from megarl.tracking.status import STATUS_FILE

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48  # of a curve, in characters
INTERVAL_S = 2.0
SILENT_S = 30.0  # a run that is silent for longer may be dead
MAX_TEXT = 600  # characters of a prompt or response shown


def main(argv: Sequence[str]) -> None:
    """Show the run until it ends or the user stops watching."""
    directory = parse(WATCH, argv)["run"]
    console = Screen()
    try:
        if not console.is_terminal:
            console.print(picture_of(directory))
            return
        with Live(console=console, screen=False, auto_refresh=False) as live:
            while True:
                state = read_mapping(directory / STATUS_FILE).get("state", "running")
                live.update(picture_of(directory), refresh=True)
                if state != "running":
                    return
                time.sleep(INTERVAL_S)
    except UserError as error:
        sys.exit(f"megarl: {error}")
    except KeyboardInterrupt:
        return


def picture_of(directory: Path) -> RenderableType:
    """Return the present state of the run in a directory, drawn for a terminal.

    Raises:
        UserError: the directory is not that of a run.
    """
    try:
        run = read_run(directory)
    except UserError:
        if not (directory / LOG_DIRECTORY).is_dir():
            raise
        return plain(f"{directory.name}  {NOTHING_YET}")
    return picture(run, read_mapping(directory / STATUS_FILE), time.time())


def picture(run: Run, status: Mapping[str, Any], now: float) -> RenderableType:
    """Return the state of a run at the Unix time `now`, drawn for a terminal."""
    return Group(
        plain(f"{run.name}  {headline(run, status, now)}", "bold"),
        plain(summary(run)),
        _curves(run),
        *map(_sample, _samples(run)[:1]),
    )


def headline(run: Run, status: Mapping[str, Any], now: float) -> str:
    """Return the state, the step and the phase of a run in one line."""
    step = f"step {max(run.last_step, status.get('step', 0))}/{status.get('total_steps', '?')}"
    state = status.get("state", "unknown")
    silent = now - status.get("time", now)
    if state == "running" and silent > SILENT_S:
        return f"{step}  silent for {silent:.0f} s: the job may be dead"
    return f"{step}  {status.get('phase') or state}" if state == "running" else f"{step}  {state}"


def sparkline(points: Points, width: int = WIDTH) -> str:
    """Return a curve as one line of blocks, from its least to its largest value; the middle for a level curve."""
    means = [value for _, value in thin(points, width)]
    low = min(means, default=0.0)
    high = max(means, default=0.0)
    if high == low:
        return BARS[len(BARS) // 2] * len(means)
    return "".join(BARS[round((mean - low) / (high - low) * (len(BARS) - 1))] for mean in means)


def _curves(run: Run) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    kl = [(name, title) for name, title in KL.items() if run.points(name)][:1]
    curves = [(title, run.points(name)) for name, title in ((REWARD, "reward"), *kl, *LEARNT.items())]
    score = score_of(run)
    if score and score.title == "validation score":
        curves.insert(0, ("validation", score.points))
    for title, points in curves:
        if points:
            table.add_row(title, plain(sparkline(points), "cyan"), f"{points[0][1]:.4g} -> {points[-1][1]:.4g}")
    return table


def _samples(run: Run) -> list[Pair]:
    """Return the samples of the first and the last validation, the greatest changes first."""
    if not run.samples:
        return []
    found = pairs(run.samples[min(run.samples)], run.samples[max(run.samples)])
    return sorted(found, key=lambda pair: -abs(pair.change))


def _sample(pair: Pair) -> Panel:
    rows = (
        ("prompt", pair.prompt, None),
        ("before", pair.before, pair.score_before),
        ("now", pair.now, pair.score_now),
    )
    text = Text()
    for title, content, score in rows:
        text.append(f"{title}{'' if score is None else f' (score {score:.4g})'}\n", style="bold")
        text.append(f"{visible(content[:MAX_TEXT])}\n")
    text.rstrip()
    return Panel(text, title="a validation sample", title_align="left")
