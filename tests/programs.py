"""Programs run the way a user runs them: as processes, from the root of the checkout."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHOWN_CHARACTERS = 5000


def run_python(*arguments: object, timeout_s: float) -> str:
    """Run `python ARGUMENTS...`; returns what it printed, errors included.

    Raises AssertionError with the end of that where the exit code is not 0. Whatever happens, none of the processes
    that the program started outlives it.
    """
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
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
    command = " ".join(map(str, arguments))
    assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{output[-SHOWN_CHARACTERS:]}"
    return output
