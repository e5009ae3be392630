"""Output for people: a live progress line on a terminal, one plain line per step elsewhere, and a table at the end."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich import box
from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from megarl.tracking.names import KL, LEARNT, REWARD, STEP_SECONDS, TIMING, TOKENS, Ending, validation_of

RECENT_STEPS = 10  # whose mean time predicts the time left
MAX_CELL = 160  # characters of a sample shown


class Console:
    """Shows the step, reward, KL to the reference, tokens per second over all ranks and the time left."""

    def __init__(self, *, total_steps: int, console: RichConsole | None = None) -> None:
        self._console = console or RichConsole()
        self._total_steps = total_steps
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._scores: dict[str, list[float]] = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=console,
            )
            self._task = self._progress.add_task("step", total=total_steps, numbers="starting")
            self._progress.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Show a step; print validation scores on a separate, permanent line."""
        validation = validation_of(metrics)
        self._remember(metrics, validation)
        numbers = self._numbers(metrics, step)
        title = f"step {step}/{self._total_steps}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=title, numbers=numbers, refresh=True)
        elif numbers:
            self._print(f"{title}  {numbers}")
        if validation:
            scores = "  ".join(f"{source} {value:.4g}" for source, value in validation.items())
            self._print(f"{title}  validation  {scores}")

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Show a table, with long cells cut."""
        if rows:
            self._console.print(_table(f"{name} at step {step}", rows))

    def close(self, summary_rows: Sequence[Mapping[str, Any]] = (), *, ending: Ending = "finished") -> None:
        """Show the scores, the time of each phase, and the given rows."""
        if self._progress is not None:
            self._progress.stop()
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
            {"phase": name.removeprefix(TIMING), "seconds": f"{seconds:.1f}", "share": f"{seconds / total:.0%}"}
            for name, seconds in sorted(self._seconds.items(), key=lambda item: -item[1])
        ]
        for title, rows in ((f"run {ending}", scores), ("time", phases), ("summary", summary_rows)):
            if rows:
                self._console.print(_table(title, rows))

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

    def _numbers(self, metrics: Mapping[str, float], step: int) -> str:
        shown = []
        if REWARD in metrics:
            shown.append(f"reward {metrics[REWARD]:.3f}")
        shown += [f"{title} {metrics[name]:.4f}" for name, title in LEARNT.items() if name in metrics]
        if kl := [metrics[name] for name in KL if name in metrics]:
            shown.append(f"kl {kl[0]:.4f}")
        if TOKENS in metrics and STEP_SECONDS in metrics:
            shown.append(f"{metrics[TOKENS] / metrics[STEP_SECONDS]:,.0f} tokens/s")
        if self._recent and STEP_SECONDS in metrics:
            left = (self._total_steps - step) * sum(self._recent) / len(self._recent)
            shown.append(f"left {timedelta(seconds=round(left))}")
        return "  ".join(shown)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in rows[0]:
        numeric = all(isinstance(row[column], int | float) for row in rows)
        table.add_column(str(column), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    cut = text if len(text) <= MAX_CELL else text[: MAX_CELL - 3] + "..."
    return cut.replace("[", r"\[")
