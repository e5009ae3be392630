"""Programs as users run them: processes, by default in the root of the checkout."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN_CHARACTERS = 5000
PYTHON = (sys.executable, "-m")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m")


def run_program(*command: object, timeout_s: float, cwd: Path = ROOT) -> tuple[int, str]:
    """Run a command and return its exit code and all that it printed, errors included.

    No process that the program starts outlives this call.
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
    """Run a command that must succeed and return what it printed.

    Raises AssertionError with the end of what it printed if the exit code is not 0.
    """
    code, output = run_program(*command, timeout_s=timeout_s, cwd=cwd)
    assert code == 0, f"{' '.join(map(str, command))} ended with {code}:\n{output[-SHOWN_CHARACTERS:]}"
    return output


CTRL_C = b"\x03"


@contextmanager
def hearing_hang_ups() -> Iterator[None]:
    """Let programs that start in the block receive SIGHUP, also if the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class AtTerminal:
    """A command with its own terminal, which sends a signal when somebody types Ctrl-C."""

    def __init__(self, command: Sequence[object], environ: Mapping[str, str]) -> None:
        with hearing_hang_ups():
            self.pid, self._terminal = pty.fork()
            if self.pid == 0:
                os.chdir(ROOT)
                os.execvpe(str(command[0]), list(map(str, command)), {**environ})
        self._output = b""

    def type(self, keys: bytes) -> None:
        """Type `keys`."""
        os.write(self._terminal, keys)

    def read_until(self, words: str) -> str:
        """Return what the command shows until `words` appear or the command ends."""
        while words.encode() not in self._output and (more := self._read()):
            self._output += more
        return self._output.decode(errors="replace")

    def end(self) -> tuple[int, str]:
        """Wait for the end of the command; return its exit code as a shell counts it, and all that it showed."""
        while more := self._read():
            self._output += more
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._terminal)
        return code if code >= 0 else 128 - code, self._output.decode(errors="replace").replace("\r\n", "\n")

    def hang_up(self) -> int:
        """Close the terminal, as a lost connection does, and return the exit code of the command as a shell counts it.

        Later output of the command is lost.
        """
        os.close(self._terminal)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code if code >= 0 else 128 - code

    def _read(self) -> bytes:
        try:
            return os.read(self._terminal, 1 << 16)
        except OSError:  # every process that had the terminal has ended
            return b""


def run_python(*arguments: object, timeout_s: float) -> str:
    """Call `succeed` with `python ARGUMENTS...`."""
    return succeed(sys.executable, *arguments, timeout_s=timeout_s)
