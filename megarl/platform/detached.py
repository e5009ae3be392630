"""A process that outlives the one that starts it, and its terminal."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from megarl.platform.log import LOG_DIRECTORY

CONSOLE = Path(LOG_DIRECTORY, "console.txt")
"""The file, in the directory of a run, with what a detached process prints."""


def start_detached(command: Sequence[str], directory: Path) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own, without input; its output is appended to `directory / CONSOLE`."""
    console = directory / CONSOLE
    console.parent.mkdir(parents=True, exist_ok=True)
    with console.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # neither the end of a terminal or a kernel reaches it, nor an interrupt there
        )
