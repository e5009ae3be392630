"""The machine that `scripts/gpu_check.py` checks: its devices, its directory, and programs with time limits."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.platform.errors import UserError
from megarl.platform.files import write_whole

SHOWN_CHARACTERS = 2000
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A machine to check, and the place of the results."""

    out: Path
    num_devices: int
    device: Literal["cuda", "cpu"] = "cuda"  # on the CPU there are as many processes as devices
    rehearses: bool = False  # with tiny models

    @property
    def is_hollow(self) -> bool:
        """Whether the devices compute nothing and have no speed (docs/hollow.md)."""
        return self.rehearses and self.device == "cuda"

    @property
    def dtype(self) -> str:
        """The type of weights and activations."""
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def work(self) -> Path:
        """The directory of models and runs, which nobody needs afterwards."""
        return self.out / "work"

    def program(self, stage: str, *command: object, limit_s: float, expected: int = 0) -> str:
        """Run `python COMMAND...` with its output in OUT/logs/STAGE.txt. Return what it printed.

        Raises:
            UserError: it ended with another code than `expected`, or not within the limit; nothing of it runs on.
        """
        with self.started(stage, *command) as running:
            return running.finish(limit_s=limit_s, expected=expected)

    def started(self, stage: str, *command: object) -> "Running":
        """Start `python COMMAND...`."""
        log = self.out / "logs" / f"{stage}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        if self.device == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with log.open("ab") as file:
            start = file.tell()
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Running(process=process, log=log, start=start)


@dataclass(frozen=True, kw_only=True)
class Running:
    """A program that runs, in a session of its own. At the end of the block nothing of it is left."""

    process: "subprocess.Popen[bytes]"
    log: Path
    start: int  # of its output in the log

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # all have ended
            return
        finally:
            self.process.wait()

    def printed(self) -> str:
        """Return its output so far."""
        return self.log.read_bytes()[self.start :].decode(errors="replace")

    def wait_until(self, condition: Callable[[], bool], *, limit_s: float) -> None:
        """Wait for the condition. Raises UserError if the program ends first, or after the limit."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"it ended, or took longer than {limit_s:.0f} s:\n{self.printed()[-SHOWN_CHARACTERS:]}")
            time.sleep(0.1)

    def finish(self, *, limit_s: float, expected: int | None = 0) -> str:
        """Wait for its end, and return its output. `expected` None allows any code. Raises what `Site.program` does."""
        try:
            code = self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise self._error(f"took longer than {limit_s:.0f} s") from None
        if expected is not None and code != expected:
            raise self._error(f"ended with code {code}, not {expected}")
        return self.printed()

    def _error(self, cause: str) -> UserError:
        return UserError(f"it {cause}; the end of {self.log}:\n{self.printed()[-SHOWN_CHARACTERS:]}")


def last_object(printed: str) -> Any:
    """Return the JSON object in the last line of an output that has one."""
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        raise UserError(f"it printed no JSON object:\n{printed[-SHOWN_CHARACTERS:]}")
    return json.loads(lines[-1])


def write_json(path: Path, value: Any) -> None:
    """Write a complete JSON file, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=2).encode())
