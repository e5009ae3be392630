"""`python -m benchmarks step --peer trl`: TRL's GRPO on the same workload, in turn with megarl's steps.

TRL has an environment of its own and runs there as a program (`peer_trl.py`), which waits while megarl works.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks import report
from benchmarks.workload import Workload
from megarl.platform.errors import UserError
from megarl.platform.screen import Screen
from megarl.tracking.names import STEP_SECONDS, TIMING, TOKENS

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PHASES: Mapping[str, Sequence[str]] = {
    "gen": ("gen",),
    "sync": ("sync", "sync_check"),
    "ref": ("ref",),
    "update": ("old_log_prob", "update_actor"),
    "step": ("step",),
}
"""Phase of TRL -> the phases of megarl that do this work. `gen` contains `sync`, and `step` contains all."""
Step = Mapping[str, float]


def check(workload: Workload, overrides: Sequence[str]) -> None:
    """Check that TRL can do the work of a step. The user adds arguments of `megarl train`.

    Raises:
        UserError: TRL cannot do this work, or its environment is missing.
    """
    if workload.algorithm != "grpo":
        raise UserError(f"--peer trl --algorithm {workload.algorithm}: TRL has no such trainer; use grpo")
    keys = {argument.partition("=")[0] for argument in workload.arguments(Path())}
    for override in overrides:
        if override.partition("=")[0] in keys:
            raise UserError(f"{override}: --peer trl would do other work, because TRL does not read this key; omit it")
    if not PYTHON.exists():
        raise UserError(f"--peer trl: {PYTHON} is missing; run `make setup-peers` in {ROOT}")


class Trl:
    """TRL's trainer in a process that takes steps when asked; a context manager that ends the process."""

    def __init__(self, workload: Workload, directory: Path, *, dtype: str) -> None:
        """Start the process.

        Args:
            workload: the work of a step.
            directory: where the files of the workload are.
            dtype: of trainer and engine.

        Raises:
            UserError: the process ended; its messages are on standard error.
        """
        settings = workload.settings(directory) | {"dtype": dtype, "output": str(directory / "trl")}
        self._process = subprocess.Popen(
            [PYTHON, "-m", "benchmarks.peer_trl", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        self.versions: dict[str, str] = self._answer()

    def __enter__(self) -> "Trl":
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.terminate()

    def steps(self, num_steps: int) -> list[Step]:
        """Take some steps, and return the metrics of each by megarl's names. Raises UserError as `__init__` does."""
        assert self._process.stdin
        self._process.stdin.write(f"{num_steps}\n")
        self._process.stdin.flush()
        answers = [self._answer() for _ in range(num_steps)]
        return [
            {TIMING + phase: seconds for phase, seconds in answer["seconds"].items()} | {TOKENS: answer["tokens"]}
            for answer in answers
        ]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"TRL ended with exit code {self._process.wait()}; its messages are above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def beside(steps: Sequence[Step], theirs: Sequence[Step], num_samples: int) -> dict[str, Any]:
    """Return TRL's times and throughput, and how many times as fast a token is in each phase of megarl."""
    seconds = {}
    times_faster = {}
    for phase, ours in PHASES.items():
        seconds[phase] = report.spread([step[TIMING + phase] for step in theirs])
        per_token = median(sum(step.get(TIMING + name, 0.0) for name in ours) / step[TOKENS] for step in steps)
        times_faster[phase] = median(step[TIMING + phase] / step[TOKENS] for step in theirs) / per_token
    return {
        "seconds": seconds,
        "samples_per_second": num_samples / seconds["step"]["median"],
        "tokens_per_second": median(step[TOKENS] / step[STEP_SECONDS] for step in theirs),
        "tokens": median(step[TOKENS] for step in theirs),
        "times_faster": times_faster,
    }


def show(found: Mapping[str, Any], console: Screen) -> None:
    """Print TRL's times as a table."""
    table = Table("TRL", "median s", "min s", "max s", "megarl is faster")
    for phase, times in found["seconds"].items():
        row = (f"{times[key]:.3f}" for key in ("median", "min", "max"))
        table.add_row(phase, *row, f"{found['times_faster'][phase]:.2f}x")
    console.print(table)
    for title in ("samples_per_second", "tokens_per_second", "tokens", "versions"):
        console.print(f"TRL's {title}: {found[title]}", highlight=False)
