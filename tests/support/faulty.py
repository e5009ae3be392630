"""Training that meets with faults: `python -m tests.support.faulty FAULTS.json ARGUMENTS...` as for megarl.train.

The faults come in their order, one in the life of a job: one that is started again meets the first that no earlier one
has met. `FAULTS.met/NUMBER.json` says where each came. Nothing in megarl knows of this: what it tells its watchdog is
overheard.
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

import torch

from megarl import train
from megarl.distributed import watchdog
from megarl.entry import run
from tests.support.programs import ROOT


def break_engine() -> None:
    """Have vLLM fail at its next step, on this rank alone."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def execute_model(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    GPUModelRunner.execute_model = execute_model


START = "start"  # the watchdog's word for all that comes before the first step
KINDS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(3600),
    "engine": break_engine,
    "none": lambda: None,  # but for the others' patience
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to a rank in a phase, at the latest when it leaves it."""

    rank: int
    phase: str
    step: int = 0  # the first in which it may come, counted from 0
    kind: str = "kill"
    delay_s: float = 0.0  # after the phase has begun
    patience_s: float | None = None  # what a phase may take from then on; None: trainer.phase_timeout_s


class Faults:
    """A list of faults and what became of them, in files."""

    def __init__(self, path: Path) -> None:
        self.path, self._met = path, path.with_suffix(".met")

    def write(self, faults: Sequence[Fault]) -> None:
        """Begin anew, with these."""
        self._met.mkdir()
        self.path.write_text(json.dumps([asdict(fault) for fault in faults], indent=1))

    def next(self) -> tuple[int, Fault | None]:
        """How many have been met, and the one after those."""
        faults, number = json.loads(self.path.read_text()), len(self.met())
        return number, Fault(**faults[number]) if number < len(faults) else None

    def is_met(self, number: int) -> bool:
        """Whether this one has come."""
        return (self._met / f"{number}.json").exists()

    def meet(self, number: int, **place: Any) -> None:
        """This one comes now, at `place`."""
        self._tell(f"{number}.json", number=number, **place)

    def begin(self, number: int, *, step: int) -> None:
        """The job that has this one before it begins with `step`."""
        self._tell(f"{number}.begun", number=number, step=step)

    def met(self) -> list[dict[str, Any]]:
        """Where those came that have come, in their order."""
        return self._read("*.json")

    def begun(self) -> list[dict[str, Any]]:
        """The numbers that were to come when a job began, with its first step and the time."""
        return self._read("*.begun")

    def _tell(self, name: str, **news: Any) -> None:
        part = self._met / f"{name}.part"
        part.write_text(json.dumps({"time": time.time(), **news}))
        part.rename(self._met / name)

    def _read(self, pattern: str) -> list[dict[str, Any]]:
        news = [json.loads(path.read_text()) for path in self._met.glob(pattern)]
        return sorted(news, key=lambda told: told["number"])


class Overhearing:
    """A rank that hears what the watchdog hears, and falls to the fault if it is its own."""

    def __init__(self, faults: Faults, number: int, fault: Fault | None, *, tells: bool) -> None:
        self._faults, self._number, self._fault = faults, number, fault
        self._note, self._lock = watchdog.note, threading.Lock()
        self._is_due, self._tells = False, tells  # the first step of the job
        watchdog.note = self.note
        if fault and fault.phase == START:
            self._come_due(fault)

    def note(self, **news: Any) -> str | None:
        """Go on in the watchdog's eyes; meet the fault if the phase is over, or begins."""
        if self._fault and self._is_due:
            self._fall(self._fault)
        before = self._note(**news)
        if "step" in news and self._tells:
            self._tells = False
            self._faults.begin(self._number, step=news["step"])
        if self._fault:
            # Sampling begins with a sync, a phase of its own; after it the rows are told.
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
    """Step and phase of this rank."""
    watching = watchdog._watchdog
    return (watching._place.step, watching._place.phase) if watching else (0, START)


def lose_patience(faults: Faults, number: int, patience_s: float) -> None:
    """Once the fault has come, have the watchdog wait no longer than `patience_s`. Honest phases have their time."""
    while not faults.is_met(number):
        time.sleep(0.1)
    if watchdog._watchdog:
        watchdog._watchdog._timeout_s = watchdog._watchdog._grace_s = patience_s


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Train on every rank of the job; prepare this one for the fault."""
    if (rank := os.environ.get("RANK")) is not None:  # else a launcher's process
        faults = Faults(Path(argv[0]))
        number, fault = faults.next()
        its_own = fault if fault and fault.rank == int(rank) else None
        if its_own or rank == "0":
            Overhearing(faults, number, its_own, tells=rank == "0")
        if fault and fault.patience_s is not None:
            arguments = faults, number, fault.patience_s
            threading.Thread(target=lose_patience, args=arguments, daemon=True).start()
    run("tests.support.faulty", argv, read_arguments, train.train)


def read_arguments(argv: Sequence[str], *, world_size: int | None) -> train.Arguments:
    """What is said after the faults."""
    return train.read_arguments(argv[1:], world_size=world_size)


def serve(rank: int, world_size: int, port: int, log: Path, argv: Sequence[str]) -> None:
    """Be a rank of a job in a forked process; the store of the job is at `port`, what is printed goes to `log`."""
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"},
        **{"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.chdir(ROOT)
    torch.set_num_threads(1)
    main(argv)


if __name__ == "__main__":
    main()
