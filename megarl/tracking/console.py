"""Output for people: live bars on a terminal, one plain line for each step elsewhere, and tables at the end."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from rich import box
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from megarl.platform import progress
from megarl.platform.screen import Screen, labelled, plain
from megarl.platform.terminal import on_one_line, shortened
from megarl.tracking.names import (
    KL,
    LEARNT,
    PHASES,
    REWARD,
    STEP_SECONDS,
    TIMING,
    TOKENS,
    Ending,
    phases_of,
    titled,
    validation_of,
)
from megarl.tracking.protocol import NextSteps, Row
from megarl.tracking.samples import GENERATIONS, pairs

RECENT_STEPS = 10  # whose mean time predicts the time left
LEAST_SHARE = 0.005  # of the time, for a phase to be shown
MAX_CELL = 160  # characters of a sample shown
LIVE_ROWS = 3  # samples shown after a validation during the run
REFRESHES_PER_SECOND = 2


class Console:
    """Shows the step, its phase, the reward, the KL, tokens per second over all ranks and the time left."""

    def __init__(
        self,
        *,
        total_steps: int,
        console: Screen | None = None,
        next_steps: NextSteps = lambda ending: (),
    ) -> None:
        """Show a run of `total_steps`, and at its end the places and commands that `next_steps` returns."""
        self._console = console or Screen()
        self._next_steps = next_steps
        self._total_steps = total_steps
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._scores: dict[str, list[float]] = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)
        self._samples: list[tuple[int, Sequence[Row]]] = []  # the first and the last validation's
        self._bars: _Bars | None = None
        if self._console.is_terminal:
            self._bars = _Bars(self._console)
            self._task = self._bars.add_task("step", total=total_steps, numbers="starting")
            self._bars.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Show a step and its validation scores: on a terminal in the bar and above it, elsewhere in one line."""
        validation = {on_one_line(source): value for source, value in validation_of(metrics).items()}
        self._remember(metrics, validation)
        title = f"step {step}/{self._total_steps}"
        numbers = self._numbers(metrics, step)
        if self._bars is None:
            scores = [f"validation {source} {value:.4g}" for source, value in validation.items()]
            parts = [*numbers, *scores, *self._left(metrics, step)]
            if parts:
                self._print("  ".join([title, *parts]))
            return
        shown = "  ".join([*numbers, *self._left(metrics, step)])
        self._bars.update(self._task, completed=step, description=title, numbers=shown, refresh=True)
        for source in validation:
            self._console.print(_score_line(title, source, self._scores[f"validation {source}"]), soft_wrap=True)

    def log_table(self, name: str, rows: Sequence[Row], *, step: int) -> None:
        """Show a table, with long cells cut. Off a terminal, samples of validations wait until the end."""
        if not rows:
            return
        if name != GENERATIONS:
            self._console.print(_table(f"{name} at step {step}", rows))
            return
        self._samples = [*self._samples[:1], (step, rows)]
        if self._bars is not None:
            self._show_samples(LIVE_ROWS)

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Show the last samples, the scores, the time of each phase, the given rows, and the next steps."""
        if self._bars is not None:
            self._bars.stop()
        self._show_samples()
        scores = [
            {
                "score": name,
                "first": values[0],
                "last": values[-1],
                "best": max(values),
                "change": values[-1] - values[0],
            }
            for name, values in self._scores.items()
        ]
        total = self._seconds.get(STEP_SECONDS) or sum(self._seconds.values())
        phases = [
            {"phase": titled(phase), "seconds": f"{seconds:.1f}", "share": f"{seconds / total:.0%}"}
            for phase, seconds in phases_of(self._seconds)
            if seconds >= LEAST_SHARE * total
        ]
        for title, rows in ((f"run {ending}", scores), ("time", phases), ("summary", summary_rows)):
            if rows:
                self._console.print(_table(title, rows))
        for what, where in self._next_steps(ending):
            self._console.print(labelled(f"{what:<11}", where, "bold"), soft_wrap=True)

    def _show_samples(self, most: int | None = None) -> None:
        """Show the samples of the last validation next to those of the first, the greatest changes first."""
        if not self._samples:
            return
        first, before = self._samples[0]
        last, now = self._samples[-1]
        changes = pairs(before, now) if last > first else []
        changes.sort(key=lambda pair: -abs(pair.change))
        if changes:
            title = f"{GENERATIONS} at step {first} (before) and {last} (now)"
            self._console.print(_table(title, [pair.cells() for pair in changes[:most]]))
        else:
            self._console.print(_table(f"{GENERATIONS} at step {last}", now[:most]))

    def _remember(self, metrics: Mapping[str, float], validation: Mapping[str, float]) -> None:
        for source, value in validation.items():
            self._scores[f"validation {source}"].append(value)
        if REWARD in metrics:
            self._scores["training reward"].append(metrics[REWARD])
        if STEP_SECONDS in metrics:
            self._recent.append(metrics[STEP_SECONDS])
        for name, value in metrics.items():
            if name.startswith(TIMING):
                self._seconds[name] += value

    def _numbers(self, metrics: Mapping[str, float], step: int) -> list[str]:
        shown = []
        if REWARD in metrics:
            shown.append(f"reward {metrics[REWARD]:.3f}")
        shown += [f"{title} {metrics[name]:.4f}" for name, title in LEARNT.items() if name in metrics]
        shown += [f"{title} {metrics[name]:.4f}" for name, title in KL.items() if name in metrics][:1]
        if TOKENS in metrics and STEP_SECONDS in metrics:
            shown.append(f"{metrics[TOKENS] / metrics[STEP_SECONDS]:,.0f} tokens/s")
        return shown

    def _left(self, metrics: Mapping[str, float], step: int) -> list[str]:
        if not self._recent or STEP_SECONDS not in metrics:
            return []
        left = (self._total_steps - step) * sum(self._recent) / len(self._recent)
        return [f"left {timedelta(seconds=round(left))}"]

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


class _Bars(Progress):
    """The bar of the run, and below it the phase of the step, read anew for each picture."""

    def __init__(self, console: Screen) -> None:
        super().__init__(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
        )

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bar and the phase."""
        yield from super().get_renderables()
        phase = progress.now()
        if phase:
            yield plain(f"  {describe(phase, time.monotonic())}", "cyan")


def describe(phase: progress.Phase, now: float) -> str:
    """Describe a phase in one line: what it does, how much of it is done, and the time left."""
    counted = f"  {phase.done:,} of {phase.expected:,} {phase.unit}" if phase.expected else ""
    left = phase.left(now)
    line = f"{PHASES.get(phase.name, phase.name)}{counted}  {timedelta(seconds=round(now - phase.since))}"
    if left is not None:
        line += f", left {timedelta(seconds=round(left))}"
    return line


def _score_line(title: str, source: str, scores: Sequence[float]) -> Text:
    """Return a validation score and its change since the first, green for the best so far, red below the first."""
    last = scores[-1]
    change = scores[-1] - scores[0]
    style = "red" if change < 0 else ""
    if len(scores) > 1 and last >= max(scores):
        style = "green"
    line = plain(f"{title}  validation  {source} ").append(f"{last:.4g}", style)
    if len(scores) > 1:
        line.append(f"  ({change:+.4g} since the first)", style)
    return line


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in rows[0]:
        numeric = all(isinstance(row[column], int | float) for row in rows)
        table.add_column(str(column), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: object) -> str:
    return shortened(f"{value:.4g}" if isinstance(value, float) else str(value), MAX_CELL)
