"""A command of megarl that a program runs, and waits for."""

import subprocess
import sys

from megarl.platform.errors import UserError

TAIL = 4000
"""Characters of what a command printed that an error shows."""


def run_command(*words: str, fine: tuple[int, ...] = (0,)) -> str:
    """Run a command, and return what it prints.

    Raises:
        UserError: the command ends with a code that is not `fine`, or prints nothing but errors.
    """
    done = subprocess.run([sys.executable, "-m", "megarl", *words], capture_output=True, encoding="utf-8", check=False)
    if done.returncode not in fine or (done.returncode and not done.stdout):
        raise UserError(f"megarl {words[0]} ended with code {done.returncode}; it printed\n{done.stderr[-TAIL:]}")
    return done.stdout
