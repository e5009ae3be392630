"""Programs run the way a user runs them: as processes, by default from the root of the checkout."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHOWN_CHARACTERS = 5000


def run_program(*command: object, timeout_s: float, cwd: Path = ROOT) -> tuple[int, str]:
    """Run a command; returns its exit code and what it printed, errors included.

    Whatever happens, none of the processes that the program started outlives it.
    """
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output


def succeed(*command: object, timeout_s: float, cwd: Path = ROOT) -> str:
    """Run a command that must succeed, and return what it printed.

    Raises AssertionError with the end of that where the exit code is not 0.
    """
    code, output = run_program(*command, timeout_s=timeout_s, cwd=cwd)
    assert code == 0, f"{' '.join(map(str, command))} ended with {code}:\n{output[-SHOWN_CHARACTERS:]}"
    return output


def run_python(*arguments: object, timeout_s: float) -> str:
    """`succeed` with `python ARGUMENTS...`."""
    return succeed(sys.executable, *arguments, timeout_s=timeout_s)
