"""Training with planted faults: `python -m tests.support.faulty FAULTS.json ARGUMENTS...` as for megarl.commands.train.

Each life of a job meets the first fault that no earlier life met, and `FAULTS.met/NUMBER.json` records its place.
megarl knows nothing of this module, which listens to what megarl reports to its watchdog.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.commands import train
from megarl.commands.entry import JobProgram, run
from megarl.distributed import watchdog


def break_engine() -> None:
    """Make vLLM fail at its next step on this rank."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def execute_model(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    GPUModelRunner.execute_model = execute_model


START = "start"  # the phase before the first step
KINDS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(3600),
    "engine": break_engine,
    "none": lambda: None,  # only `patience_s` acts
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a rank in a phase; it comes at the latest when the rank leaves the phase."""

    rank: int
    phase: str
    step: int = 0  # the earliest, counted from 0
    kind: str = "kill"
    delay_s: float = 0.0  # after the phase has begun
    patience_s: float | None = None  # limit of phases after the fault; None: trainer.phase_timeout_s


class Faults:
    """A list of faults and records of where they came, in files."""

    def __init__(self, path: Path) -> None:
        self.path, self._met = path, path.with_suffix(".met")

    def write(self, faults: Sequence[Fault]) -> None:
        """Write a new list."""
        self._met.mkdir()
        self.path.write_text(json.dumps([asdict(fault) for fault in faults], indent=1))

    def next(self) -> tuple[int, Fault | None]:
        """Return the number of faults that were met, and the next fault."""
        faults, number = json.loads(self.path.read_text()), len(self.met())
        return number, Fault(**faults[number]) if number < len(faults) else None

    def is_met(self, number: int) -> bool:
        """Return whether fault `number` was met."""
        return (self._met / f"{number}.json").exists()

    def meet(self, number: int, **place: Any) -> None:
        """Record that fault `number` comes now, at `place`."""
        self._tell(f"{number}.json", number=number, **place)

    def begin(self, number: int, *, step: int) -> None:
        """Record that the life before fault `number` begins with `step`."""
        self._tell(f"{number}.begun", number=number, step=step)

    def met(self) -> list[dict[str, Any]]:
        """Return the records of all faults that were met, in order."""
        return self._read("*.json")

    def started(self) -> list[dict[str, Any]]:
        """Return for each life the number of its fault, its first step and the time."""
        return self._read("*.begun")

    def _tell(self, name: str, **news: Any) -> None:
        part = self._met / f"{name}.part"
        part.write_text(json.dumps({"time": time.time(), **news}))
        part.rename(self._met / name)

    def _read(self, pattern: str) -> list[dict[str, Any]]:
        news = [json.loads(path.read_text()) for path in self._met.glob(pattern)]
        return sorted(news, key=lambda told: told["number"])


class Overhearing:
    """A listener on a rank that hears what the watchdog hears, and executes the fault of this rank."""

    def __init__(self, faults: Faults, number: int, fault: Fault | None, *, tells: bool) -> None:
        self._faults, self._number, self._fault = faults, number, fault
        self._note, self._lock = watchdog.note, threading.Lock()
        self._is_due, self._tells = False, tells  # rank 0 records the first step
        watchdog.note = self.note
        if fault and fault.phase == START:
            self._come_due(fault)

    def note(self, **news: Any) -> str | None:
        """Pass the report on; execute the fault when its phase ends or begins."""
        if self._fault and self._is_due:
            self._fall(self._fault)
        before = self._note(**news)
        if "step" in news and self._tells:
            self._tells = False
            self._faults.begin(self._number, step=news["step"])
        if self._fault:
            # Sampling begins with a sync, which is a phase of its own; then the rows are reported.
            begins = "rows" in news if self._fault.phase == "gen" else "phase" in news
            step, phase = place()
            if begins and phase == self._fault.phase and step >= self._fault.step:
                self._come_due(self._fault)
        return before

    def _come_due(self, fault: Fault) -> None:
        self._is_due = True
        if not fault.delay_s:
            self._fall(fault)
            return
        timer = threading.Timer(min(fault.delay_s, threading.TIMEOUT_MAX), self._fall, [fault])
        timer.daemon = True
        timer.start()

    def _fall(self, fault: Fault) -> None:
        with self._lock:
            if not self._faults.is_met(self._number):
                step, phase = place()
                self._faults.meet(self._number, rank=fault.rank, step=step, phase=phase)
                KINDS[fault.kind]()


def place() -> tuple[int, str]:
    """Return the step and phase of this rank."""
    watching = watchdog._watchdog
    return (watching._report.step, watching._report.phase) if watching else (0, START)


def lose_patience(faults: Faults, number: int, patience_s: float) -> None:
    """Shorten the limit of the watchdog to `patience_s` when the fault has come, and not before."""
    while not faults.is_met(number):
        time.sleep(0.1)
    if watchdog._watchdog:
        watchdog._watchdog.timeout_s = watchdog._watchdog.grace_s = patience_s


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Train on every rank of the job."""
    module = "tests.support.faulty"
    run(JobProgram(module=module, load=read_arguments, body=train.train, imports=train.PROGRAM.imports), argv)


def read_arguments(argv: Sequence[str], *, world_size: int | None) -> train.TrainArguments:
    """Prepare this rank for its fault, and read the arguments that follow the file of faults."""
    if (rank := os.environ.get("RANK")) is not None:  # a launcher has no rank
        prepare(Faults(Path(argv[0])), rank)
    return train.read_arguments(argv[1:], world_size=world_size)


def prepare(faults: Faults, rank: str) -> None:
    """Prepare this rank for the next fault."""
    number, fault = faults.next()
    its_own = fault if fault and fault.rank == int(rank) else None
    if its_own or rank == "0":
        Overhearing(faults, number, its_own, tells=rank == "0")
    if fault and fault.patience_s is not None:
        arguments = faults, number, fault.patience_s
        threading.Thread(target=lose_patience, args=arguments, daemon=True).start()


if __name__ == "__main__":
    main()
