"""A job that is told to end finishes its step on all ranks and ends with the code that says: start me again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.distributed.signals import ECHO_S, EXIT_CODE
from tests.dist.test_distributed_launch import NEEDS_MPIRUN, ROOT, start

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the ranks to tell"),
]
MODULE = ["-m", "tests.dist.told"]
PLAIN = [sys.executable, *MODULE]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, *MODULE]


class Job:
    """A job whose ranks have begun their first step."""

    def __init__(self, command: list[str], directory: Path, *arguments: str) -> None:
        self.directory = directory
        self.process = start(command, str(directory), *arguments)
        self.ranks = [self._began(rank) for rank in (0, 1)]

    def _began(self, rank: int) -> int:
        path = self.directory / f"began_{rank}"
        while not path.exists() or not (words := path.read_text()).endswith("\n"):
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        return int(words)

    def end(self) -> tuple[int, str]:
        """Exit code and messages."""
        output, errors = self.process.communicate(timeout=240)
        return self.process.returncode, errors + output

    @property
    def saved(self) -> list[str]:
        """After which step each rank ended."""
        return [path.read_text() for path in sorted(self.directory.glob("saved_*"))]


@pytest.mark.parametrize(
    ("command", "number", "to", "expected"),
    [
        pytest.param(PLAIN, signal.SIGUSR1, "launcher", EXIT_CODE, id="plain"),
        pytest.param(PLAIN, signal.SIGTERM, "everybody", EXIT_CODE, id="plain-everybody"),
        pytest.param(PLAIN, signal.SIGTERM, "rank 1", EXIT_CODE, id="plain-rank"),
        pytest.param([*TORCHRUN, *MODULE], signal.SIGTERM, "launcher", 1, id="torchrun"),
        pytest.param([*TORCHRUN, "--max-restarts=1", *MODULE], signal.SIGUSR1, "rank 1", 0, id="torchrun-restarts"),
        pytest.param(MPIRUN, signal.SIGUSR1, "launcher", EXIT_CODE, id="mpirun", marks=NEEDS_MPIRUN),
    ],
)
def test_all_ranks_end_after_one_step(
    tmp_path: Path, command: list[str], number: signal.Signals, to: str, expected: int
) -> None:
    job = Job(command, tmp_path)
    told = {"launcher": [job.process.pid], "rank 1": [job.ranks[1]], "everybody": [*job.ranks, job.process.pid]}
    for pid in told[to]:
        os.kill(pid, number)
    code, messages = job.end()
    assert code == expected, messages
    first, second = job.saved
    assert first == second
    assert f"megarl: told to end, step {first} is saved; the same command goes on from there" in messages


def runs(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # that of a zombie is empty
    except OSError:
        return False


@NEEDS_MPIRUN
def test_ranks_do_not_outlive_a_killed_mpirun(tmp_path: Path) -> None:
    job = Job(MPIRUN, tmp_path)
    job.process.kill()
    job.end()
    while any(map(runs, job.ranks)):
        time.sleep(0.05)  # until the test's own time limit


@pytest.mark.parametrize("how", ["busy", "stuck"])
def test_a_second_sigterm_does_not_wait(tmp_path: Path, how: str) -> None:
    job = Job(PLAIN, tmp_path, how)
    while job.process.poll() is None:
        job.process.terminate()
        try:
            job.process.wait(ECHO_S + 1)
        except subprocess.TimeoutExpired:
            assert not job.saved
    code, messages = job.end()
    assert code == 128 + signal.SIGTERM, messages


def test_outside_of_its_steps_a_process_ends_at_once() -> None:
    code = "from megarl.distributed import signals; import os; signals.listen(); os.kill(os.getpid(), 10); print('on')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (EXIT_CODE, b"")
