"""A deadline for every phase of a run: if a rank misses it, all ranks write reports, and the job ends.

A rank that waits in a collective cannot be interrupted, so each rank has a watching thread. All ranks go through the
same phases in the same order, so the ranks that have begun the fewest phases hold up the others. All ranks see the
directory of the reports; the first report in it makes every other rank report, too.

    DIRECTORY/rank_3.json    rank, step, phase, rows, line of megarl, and the stacks of all threads
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megarl.platform.terminal import print_message

EXIT_CODE = 124  # the exit code of `timeout`
GRACE_S = 20.0
COLLECTIVES = tuple(f"{os.sep}{name}{os.sep}distributed{os.sep}" for name in ("torch", "vllm"))
TRANSFER = ".wait()"  # of a collective that was begun: C code, so the innermost line is that of its caller
PACKAGE = str(Path(__file__).parents[1])
HELPERS = str(Path(__file__).parent)


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """The progress of a rank."""

    rank: int
    host: str
    num_phases: int  # that the rank has begun since the start of the run
    step: int
    phase: str
    rows: Sequence[int]  # of the data set that this rank samples responses to
    where: str = ""  # the innermost line of megarl in the main thread, outside of this package if there is one
    waits: bool = False  # whether the rank waits for other ranks


_watchdog: "Watchdog | None" = None  # of this process; None: nothing watches


@contextmanager
def watching(
    directory: Path, *, rank: int, world_size: int, timeout_s: float, grace_s: float = GRACE_S
) -> Iterator[None]:
    """Within the block, end the job if a rank notes no progress for `timeout_s` seconds.

    Args:
        directory: for the reports; the same on all ranks, and not yet existing.
        rank: of this process.
        world_size: ranks of the job.
        timeout_s: seconds that a phase may take.
        grace_s: seconds that the other ranks have to report after the first report.
    """
    global _watchdog
    _watchdog = Watchdog(directory, rank=rank, world_size=world_size, timeout_s=timeout_s, grace_s=grace_s)
    _watchdog.start()
    try:
        yield
    finally:
        _watchdog.stop()
        _watchdog = None


def note(*, step: int | None = None, phase: str | None = None, rows: Sequence[int] | None = None) -> str | None:
    """Note that this rank begins `phase` of `step`, with `rows`; a value that is None stays the same.

    Return the phase before; without a watchdog do nothing and return None.
    """
    if not _watchdog:
        return None
    news = {"step": step, "phase": phase, "rows": rows}
    return _watchdog.note(**{name: value for name, value in news.items() if value is not None})


def note_progress() -> None:
    """Note progress within the phase, and start the deadline of the phase anew.

    Only for progress that all ranks note: it does not count as a phase, and the number of phases decides which rank
    holds up the others.
    """
    if _watchdog:
        _watchdog.note_progress()


@contextmanager
def polling(holds_up: Callable[[], bool]) -> Iterator[None]:
    """Within the block, let `holds_up` tell the reports whether the other ranks wait for this rank.

    For ranks that meet in one collective after another until all are done: their stacks may then show any line.
    """
    if not _watchdog:
        yield
        return
    _watchdog.holds_up = holds_up
    try:
        yield
    finally:
        _watchdog.holds_up = None


@dataclass(eq=False)
class Watchdog:
    """A thread that ends the job if this rank stays in one phase for `timeout_s` seconds."""

    directory: Path
    rank: int
    world_size: int
    timeout_s: float
    grace_s: float
    holds_up: Callable[[], bool] | None = None  # None: the stack of the main thread tells

    def __post_init__(self) -> None:
        host = socket.gethostname()
        self._report = RankProgress(rank=self.rank, host=host, num_phases=0, step=0, phase="start", rows=())
        self._since = time.monotonic()
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megarl-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch; the directory must not exist yet."""
        self._since = time.monotonic()
        self._arm_last_resort()
        self._thread.start()

    def note(self, **news: Any) -> str:
        """Note a new phase, start its deadline, and return the phase before."""
        before = self._report.phase
        self._report = replace(self._report, num_phases=self._report.num_phases + 1, **news)
        self.note_progress()
        return before

    def note_progress(self) -> None:
        """Start the deadline of the phase anew."""
        self._since = time.monotonic()
        self._arm_last_resort()

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._ended.wait(self.grace_s / 4):
            is_told = os.path.exists(self.directory)  # noqa: PTH110 - an error of the disk does not end this thread
            if is_told or time.monotonic() - self._since > self.timeout_s:
                self._end_job()

    def _arm_last_resort(self) -> None:
        """Arrange for C code to print the stacks and exit, in case a hang blocks all Python threads of this rank."""
        faulthandler.dump_traceback_later(self.timeout_s + 3 * self.grace_s, exit=True, file=2)  # stderr

    def _end_job(self) -> None:
        """Write this rank's report, have the lowest rank that reported print a summary, and exit."""
        late = threading.Timer(3 * self.grace_s, os._exit, [EXIT_CODE])  # the disk or the terminal may hang
        late.daemon = True
        late.start()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._write(self.directory / f"rank_{self.rank}.json")
            reports = self._wait_for_reports()
            if self.rank == min(reports):
                found = list(reports.values())
                size = self.world_size
                words = summary(found, world_size=size, timeout_s=self.timeout_s, directory=self.directory)
                print_message(words)
            else:
                time.sleep(self.grace_s)  # a launcher ends all ranks when the first one exits
        except OSError:  # the disk may be full
            traceback.print_exc()
        os._exit(EXIT_CODE)

    def _write(self, path: Path) -> None:
        """Write this rank's report, completely or not at all."""
        frame = sys._current_frames().get(self._main or 0)
        lines = traceback.extract_stack(frame) if frame else []
        in_package = [line for line in lines if line.filename.startswith(PACKAGE)]
        ours = [line for line in in_package if not line.filename.startswith(HELPERS)] or in_package
        where = ""
        if ours:
            where = f"{Path(ours[-1].filename).relative_to(Path(PACKAGE).parent)}:{ours[-1].lineno}"
        waits = not self.holds_up() if self.holds_up else _in_collective(lines)
        report = replace(self._report, where=where, waits=waits)
        temporary = path.with_suffix(".part")
        with temporary.open("w+", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read().splitlines()
        temporary.write_text(json.dumps(asdict(report) | {"stacks": stacks}, indent=1), encoding="utf-8")
        temporary.replace(path)

    def _wait_for_reports(self) -> dict[int, RankProgress]:
        """Return the reports that ranks write before the time of grace is over, by rank."""
        until = time.monotonic() + self.grace_s
        while True:
            reports = read_reports(self.directory)
            if len(reports) == self.world_size or time.monotonic() > until:
                return reports
            time.sleep(self.grace_s / 20)


def _in_collective(lines: Sequence[traceback.FrameSummary]) -> bool:
    """Return whether the innermost lines of a stack are in a collective, or wait for one that was begun."""
    inside = [line.filename for line in lines[-2:]]  # vLLM calls its own through an operator of torch
    if any(part in name for name in inside for part in COLLECTIVES):
        return True
    return any(TRANSFER in (line.line or "") for line in lines[-1:])


def read_reports(directory: Path) -> dict[int, RankProgress]:
    """Return the reports in a directory, by rank."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("rank_*.json"))]
    names = [field.name for field in fields(RankProgress)]
    return {report["rank"]: RankProgress(**{name: report[name] for name in names}) for report in found}


def summary(reports: Sequence[RankProgress], *, world_size: int, timeout_s: float, directory: Path) -> str:
    """Summarize the reports of a job for people: which ranks are behind, and which wait for them.

    Args:
        reports: of the ranks that could report.
        world_size: ranks of the job.
        timeout_s: seconds without progress.
        directory: of the reports.
    """
    silent = sorted(set(range(world_size)) - {report.rank for report in reports})
    fewest = min(report.num_phases for report in reports)
    slow = [report for report in reports if report.num_phases == fewest]
    if len(slow) == len(reports):  # all are in the same phase: ranks in a collective wait for the other ranks
        slow = [report for report in reports if not report.waits]
    behind = [f"rank {rank}: no report: stopped, dead, or its host is gone" for rank in silent]
    behind += [_describe(report) for report in slow]
    waiting = [_describe(report) for report in reports if report not in slow]
    return "\n  ".join(
        [
            f"megarl: no progress for {timeout_s:g} s (trainer.phase_timeout_s). Behind:",
            *(behind or ["no rank: all wait in collectives, but in different ones"]),
            "Waiting:",
            *(waiting or ["no rank"]),
            f"The stacks of each rank are in {directory}",
        ]
    )


def _describe(report: RankProgress) -> str:
    rows = f", rows {', '.join(map(str, report.rows))}" if report.rows else ""
    return f"rank {report.rank} on {report.host}: step {report.step}, phase {report.phase}, at {report.where}{rows}"
