"""Python for the policy: a turn is a program to run, or the answer.

The last `<answer>...</answer>` of a turn ends the episode and is scored by the rule of the row's data source. Any other
turn is run if it has a block between ```` ```python ```` and ```` ``` ````, and the environment says what the program
prints. Each program starts anew: nothing of an earlier turn remains.

This is no sandbox. A program has limits on memory, seconds, output and the size of files, no secrets of the run in its
environment, and nothing else: it may do what the user of the run may do.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from resource import RLIMIT_CPU, RLIMIT_FSIZE, setrlimit
from tempfile import TemporaryDirectory, TemporaryFile

from megarl.environments.protocol import Observation, Row, Step
from megarl.rewards.built_in import known_data_source
from megarl.rewards.tags import answer_of

MAX_FILE_BYTES = 1 << 20
"""Most bytes of a file that a program writes, its output included."""
_BLOCK = re.compile(r"```(?:python)?[ \t]*\n(.*?)```", re.DOTALL)
_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]+")  # of an object: another one in every process


class Python:
    """Runs programs until the policy answers."""

    def __init__(self, *, seconds: float = 4.0, max_output: int = 1000) -> None:
        """Stop a program after `seconds`; show at most the last `max_output` characters that it prints."""
        self._seconds = seconds
        self._max_output = max_output
        self._row: Row | None = None

    def reset(self, row: Row) -> Observation:
        """Return the row's prompt. UserError if the row's data source has no rule that scores answers."""
        known_data_source(row.data_source)
        self._row = row
        return row.prompt

    def step(self, response: str) -> Step:
        """Score an answer, or run a program."""
        row = self._row
        assert row, "reset comes first"
        if answer_of(response)[1]:
            score = known_data_source(row.data_source).score(
                data_source=row.data_source,
                solution_str=response,
                ground_truth=row.ground_truth,
                extra_info=row.extra_info,
            )
            return Step(None, score, done=True)
        programs = _BLOCK.findall(response)
        if not programs:
            return Step("no program: write it between ```python and ```", 0.0, done=False)
        return Step(self._run(programs[-1]), 0.0, done=False)

    def _run(self, program: str) -> str:
        """Return what a program prints, and how it ended if it was stopped."""
        # no name in the directory: the program cannot put another file in the place of its output
        with TemporaryDirectory(ignore_cleanup_errors=True) as directory, TemporaryFile(buffering=0) as output:
            process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-B", "-c", program],
                cwd=directory,
                env={"PATH": os.defpath, "HOME": directory, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=self._bound,
            )
            ending = self._wait(process)
            text = _ADDRESS.sub("0x0", os.pread(output.fileno(), MAX_FILE_BYTES, 0).decode(errors="replace"))
        shown = text[max(0, len(text) - self._max_output) :].strip()
        return "\n".join(filter(None, [shown, ending])) or "(no output)"

    def _bound(self) -> None:
        """Bound the processor's time and the size of files; the bound on memory is inherited."""
        seconds = max(1, round(self._seconds))
        setrlimit(RLIMIT_CPU, (seconds, seconds + 1))  # at the hard bound the kernel kills, and does not say why
        setrlimit(RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))

    def _wait(self, process: "subprocess.Popen[bytes]") -> str:
        """Wait for a program, and end all processes of its group. Return how it was stopped; '' if it was not."""
        late = f"(stopped after {self._seconds:g} s)"
        try:
            code = process.wait(self._seconds)
        except subprocess.TimeoutExpired:
            return late
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code == -signal.SIGXCPU:
            return late
        return f"(ended by signal {-code})" if code < 0 else ""
