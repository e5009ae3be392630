"""A deadline for every phase of a run: when one passes, each rank writes down where it is, and the job ends.

A rank that waits for another in a collective cannot be interrupted, so each rank has a thread that watches. All ranks
go through the same phases in the same order, so those that have begun the fewest are those that the others wait for.
All ranks see the directory of the reports; the first one in it makes every other rank report too.

    DIRECTORY/rank_3.json    rank, step, phase, rows, where in megarl, and the stacks of all its threads
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

EXIT_CODE = 124  # what `timeout` ends with
GRACE_S = 20.0
COLLECTIVES = tuple(f"{os.sep}{name}{os.sep}distributed{os.sep}" for name in ("torch", "vllm"))
TRANSFER = ".wait()"  # for one that was begun: C code, so the innermost line is its caller's
PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True, kw_only=True)
class Place:
    """How far a rank has come."""

    rank: int
    host: str
    num_phases: int  # begun since the start of the run
    step: int
    phase: str
    rows: Sequence[int]  # of the data set, that this rank samples answers to
    where: str = ""  # the innermost line of megarl in the main thread
    waits: bool = False  # in a collective


_watchdog: "Watchdog | None" = None  # a process is in one place at a time


@contextmanager
def watching(
    directory: Path, *, rank: int, world_size: int, timeout_s: float, grace_s: float = GRACE_S
) -> Iterator[None]:
    """Within the block, end the job when a rank notes no progress for `timeout_s` seconds.

    Args:
        directory: for the reports; the same on all ranks, and not there yet.
        rank: of this process.
        world_size: ranks of the job.
        timeout_s: seconds that a phase may take.
        grace_s: seconds in which the other ranks report once one has.
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
    """This rank goes on to `phase` of `step`, working on `rows`; what is None stays.

    Returns the phase that it was in; without a watchdog there is none, and nothing happens.
    """
    if not _watchdog:
        return None
    news = {"step": step, "phase": phase, "rows": rows}
    return _watchdog.note(**{name: value for name, value in news.items() if value is not None})


def note_progress() -> None:
    """This rank has come further within its phase: it has the whole time of a phase from now.

    Only for progress that all ranks note: those that began the fewest phases are behind, and phases are not counted
    here.
    """
    if _watchdog:
        _watchdog.note_progress()


class Watchdog:
    """Ends the job when this rank stays in one phase for `timeout_s` seconds."""

    def __init__(self, directory: Path, *, rank: int, world_size: int, timeout_s: float, grace_s: float) -> None:
        self._directory, self._world_size = directory, world_size
        self._timeout_s, self._grace_s = timeout_s, grace_s
        self._place = Place(rank=rank, host=socket.gethostname(), num_phases=0, step=0, phase="start", rows=())
        self._since = time.monotonic()
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megarl-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch; the directory does not exist yet."""
        self._since = time.monotonic()
        self._arm_last_resort()
        self._thread.start()

    def note(self, **news: Any) -> str:
        """This rank has come further than the phase that is returned; it has `timeout_s` seconds from now."""
        before = self._place.phase
        self._place = replace(self._place, num_phases=self._place.num_phases + 1, **news)
        self.note_progress()
        return before

    def note_progress(self) -> None:
        """This rank has `timeout_s` seconds from now."""
        self._since = time.monotonic()
        self._arm_last_resort()

    def stop(self) -> None:
        """Watch no longer."""
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._ended.wait(self._grace_s / 4):
            if time.monotonic() - self._since > self._timeout_s or self._directory.exists():
                self._end_job()

    def _arm_last_resort(self) -> None:
        """Where what hangs keeps Python from running, this rank's thread too: print the stacks and exit, in C."""
        faulthandler.dump_traceback_later(self._timeout_s + 3 * self._grace_s, exit=True, file=2)  # stderr

    def _end_job(self) -> None:
        """Write this rank's report, let the first rank that could say what all reports come to, and leave."""
        late = threading.Timer(3 * self._grace_s, os._exit, [EXIT_CODE])  # the disk or the terminal may be what hangs
        late.daemon = True
        late.start()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._report(self._directory / f"rank_{self._place.rank}.json")
            places = self._wait_for_reports()
            if self._place.rank == min(places):
                found, size = list(places.values()), self._world_size
                words = verdict(found, world_size=size, timeout_s=self._timeout_s, directory=self._directory)
                print(words, file=sys.stderr, flush=True)
            else:
                time.sleep(self._grace_s)  # a launcher ends all ranks with the first that leaves
        except OSError:  # the disk may be what hangs, or full
            traceback.print_exc()
        os._exit(EXIT_CODE)

    def _report(self, path: Path) -> None:
        """Write where this rank is, whole or not at all."""
        frame = sys._current_frames().get(self._main or 0)
        lines = traceback.extract_stack(frame) if frame else []
        ours = [line for line in lines if line.filename.startswith(PACKAGE)]
        place = replace(
            self._place,
            where=f"{Path(ours[-1].filename).relative_to(Path(PACKAGE).parent)}:{ours[-1].lineno}" if ours else "",
            waits=_in_collective(lines),
        )
        temporary = path.with_suffix(".part")
        with temporary.open("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read().splitlines()
        temporary.write_text(json.dumps(asdict(place) | {"stacks": stacks}, indent=1))
        temporary.replace(path)

    def _wait_for_reports(self) -> dict[int, Place]:
        """The places of all ranks that report before the time of grace is over."""
        until = time.monotonic() + self._grace_s
        while True:
            places = read_places(self._directory)
            if len(places) == self._world_size or time.monotonic() > until:
                return places
            time.sleep(self._grace_s / 20)


def _in_collective(lines: Sequence[traceback.FrameSummary]) -> bool:
    """Whether the innermost lines of a stack are those of a collective, or of a wait for one that was begun."""
    inside = [line.filename for line in lines[-2:]]  # vLLM calls its own through an operator of torch
    begun = [line.line or "" for line in lines[-1:]]
    return any(part in name for name in inside for part in COLLECTIVES) or any(TRANSFER in code for code in begun)


def read_places(directory: Path) -> dict[int, Place]:
    """The places of the ranks that wrote a report, by rank."""
    found = [json.loads(path.read_text()) for path in sorted(directory.glob("rank_*.json"))]
    names = [field.name for field in fields(Place)]
    return {report["rank"]: Place(**{name: report[name] for name in names}) for report in found}


def verdict(places: Sequence[Place], *, world_size: int, timeout_s: float, directory: Path) -> str:
    """What the reports of a job's ranks come to, for people: who is behind, and who waits for whom.

    Args:
        places: of the ranks that could report.
        world_size: ranks of the job.
        timeout_s: seconds that none of them came further.
        directory: of the reports.
    """
    silent = sorted(set(range(world_size)) - {place.rank for place in places})
    fewest = min(place.num_phases for place in places)
    slow = [place for place in places if place.num_phases == fewest]
    if len(slow) == len(places):  # all are in the same phase: those that wait in a collective wait for the others
        slow = [place for place in places if not place.waits]
    behind = [f"rank {rank}: no sign of it: stopped, dead, or its host is gone" for rank in silent]
    behind += [_describe(place) for place in slow]
    waiting = [_describe(place) for place in places if place not in slow]
    return "\n  ".join(
        [
            f"megarl: no progress for {timeout_s:g} s (trainer.phase_timeout_s). Behind:",
            *(behind or ["no rank: all wait in collectives, and not in the same one"]),
            "waiting:",
            *(waiting or ["no rank"]),
            f"The stacks of each rank are in {directory}",
        ]
    )


def _describe(place: Place) -> str:
    rows = f", rows {', '.join(map(str, place.rows))}" if place.rows else ""
    return f"rank {place.rank} on {place.host}: step {place.step}, phase {place.phase}, at {place.where}{rows}"
