"""A job that gets a signal finishes its step on all ranks, and its exit code asks for a restart."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.distributed.signals import ECHO_S, EXIT_CODE
from megarl.platform.detached import CONSOLE
from tests.support.launchers import NEEDS_MPIRUN, outside_launchers, start
from tests.support.programs import CTRL_C, ROOT, AtTerminal

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the ranks to tell"),
]
MODULE = ["-m", "tests.support.stoppable"]
PLAIN = [sys.executable, *MODULE]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, *MODULE]


def began(directory: Path, rank: int, process: "subprocess.Popen[str] | None" = None) -> int:
    """Return the process of a rank that has begun its first step."""
    path = directory / f"began_{rank}"
    while not path.exists() or not (words := path.read_text()).endswith("\n"):
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)
    return int(words)


def saved(directory: Path) -> list[str]:
    """Return after which step each rank ended."""
    return [path.read_text() for path in sorted(directory.glob("saved_*"))]


class Job:
    """A job whose ranks have begun their first step."""

    def __init__(self, command: list[str], directory: Path, *arguments: str) -> None:
        self.directory = directory
        self.process = start(command, str(directory), *arguments)
        self.ranks = [began(directory, rank, self.process) for rank in (0, 1)]

    def end(self) -> tuple[int, str]:
        """Exit code and messages."""
        output, errors = self.process.communicate(timeout=240)
        return self.process.returncode, errors + output


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
    first, second = saved(tmp_path)
    assert first == second
    assert f"megarl: stopped by a signal, step {first} is saved; " in messages
    assert "Traceback" not in messages or "torch.distributed.run" in command


def runs(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # empty for a zombie
    except OSError:
        return False


@NEEDS_MPIRUN
def test_ranks_do_not_outlive_a_killed_mpirun(tmp_path: Path) -> None:
    job = Job(MPIRUN, tmp_path)
    job.process.kill()
    job.end()
    while any(map(runs, job.ranks)):
        time.sleep(0.05)  # until the time limit of the test


@pytest.mark.parametrize("how", ["busy", "stuck"])
def test_a_second_sigterm_does_not_wait(tmp_path: Path, how: str) -> None:
    job = Job(PLAIN, tmp_path, how)
    while job.process.poll() is None:
        job.process.terminate()
        try:
            job.process.wait(ECHO_S + 1)
        except subprocess.TimeoutExpired:
            assert not saved(tmp_path)
    code, messages = job.end()
    # A further signal may find the launcher already without its handlers.
    assert code in (128 + signal.SIGTERM, -signal.SIGTERM), messages


def test_process_outside_steps_ends_immediately_on_signal() -> None:
    code = "from megarl.distributed import signals; import os; signals.listen(); os.kill(os.getpid(), 10); print('on')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (EXIT_CODE, b"")


SCRIPTS = {"PYTHON": sys.executable, "MODULE": "tests.support.stoppable"}
AT_TERMINAL = pytest.mark.parametrize(
    ("command", "environ", "expected"),
    [
        pytest.param(PLAIN, {}, EXIT_CODE, id="plain"),
        pytest.param(["scripts/launch_torchrun.sh"], {**SCRIPTS, "GPUS_PER_NODE": "2"}, EXIT_CODE, id="torchrun"),
        pytest.param(
            ["scripts/launch_mpirun.sh"],
            {**SCRIPTS, "HOSTS": "localhost:2", "MPIRUN_ARGS": "--oversubscribe"},
            EXIT_CODE,
            id="mpirun",
            marks=NEEDS_MPIRUN,
        ),
    ],
)


@AT_TERMINAL
def test_ctrl_c_lets_the_step_finish(
    tmp_path: Path, command: list[str], environ: dict[str, str], expected: int
) -> None:
    job = AtTerminal([*command, tmp_path], outside_launchers() | environ)
    for rank in (0, 1):
        began(tmp_path, rank)
    job.type(CTRL_C)
    code, messages = job.end()
    assert code == expected, messages
    first, second = saved(tmp_path)
    assert first == second
    assert f"megarl: stopped by a signal, step {first} is saved; " in messages
    if command == PLAIN:
        assert f"resume with\n  {shlex.join(map(str, [*PLAIN, tmp_path]))}\n" in messages
    assert "Traceback" not in messages


@AT_TERMINAL
def test_a_second_ctrl_c_does_not_wait(
    tmp_path: Path, command: list[str], environ: dict[str, str], expected: int
) -> None:
    job = AtTerminal([*command, tmp_path, "stuck"], outside_launchers() | environ)
    ranks = [began(tmp_path, rank) for rank in (0, 1)]
    job.type(CTRL_C)
    assert "ends the job at once" in job.read_until("ends the job at once")
    job.type(CTRL_C)
    code, messages = job.end()
    assert code == 128 + signal.SIGINT, messages
    assert "Traceback" not in messages
    assert not saved(tmp_path)
    while any(map(runs, ranks)):
        time.sleep(0.05)  # until the time limit of the test


@AT_TERMINAL
def test_a_closed_terminal_lets_the_step_finish(
    tmp_path: Path, command: list[str], environ: dict[str, str], expected: int
) -> None:
    job = AtTerminal([*command, tmp_path], outside_launchers() | environ)
    ranks = [began(tmp_path, rank) for rank in (0, 1)]
    assert job.hang_up() == expected
    first, second = saved(tmp_path)
    assert first == second
    while any(map(runs, ranks)):
        time.sleep(0.05)  # until the time limit of the test


@AT_TERMINAL
def test_a_job_under_nohup_outlives_its_terminal(
    tmp_path: Path, command: list[str], environ: dict[str, str], expected: int
) -> None:
    output, job_file = shlex.quote(str(tmp_path / "output")), shlex.quote(str(tmp_path / "job"))
    shell = f"nohup {shlex.join([*command, str(tmp_path)])} > {output} 2>&1 & echo $! > {job_file}; wait"
    terminal = AtTerminal(["bash", "-c", shell], outside_launchers() | environ)
    ranks = [began(tmp_path, rank) for rank in (0, 1)]
    assert terminal.hang_up() == 128 + signal.SIGHUP  # the shell
    job = int((tmp_path / "job").read_text())
    assert handles(job, signal.SIGHUP, "SigIgn")
    os.kill(job, signal.SIGHUP)
    assert all(map(runs, (job, *ranks)))
    os.kill(job, signal.SIGTERM)
    while any(map(runs, (job, *ranks))):
        time.sleep(0.05)  # until the time limit of the test
    first, second = saved(tmp_path)
    assert first == second
    assert "SIGHUP" not in (tmp_path / "output").read_text()


def test_a_detached_job_outlives_its_terminal(tmp_path: Path) -> None:
    terminal = AtTerminal([*PLAIN, tmp_path, "--detach"], outside_launchers())
    code, messages = terminal.end()
    assert code == 0, messages
    ranks = [began(tmp_path, rank) for rank in (0, 1)]
    assert all(map(runs, ranks))
    os.kill(int(messages.split()[-1]), signal.SIGTERM)  # the last line is the command that ends the job
    while any(map(runs, ranks)):
        time.sleep(0.05)  # until the time limit of the test
    first, second = saved(tmp_path)
    assert first == second
    assert f"megarl: stopped by a signal, step {first} is saved" in (tmp_path / CONSOLE).read_text()


def test_a_launcher_starts_no_detached_job(tmp_path: Path) -> None:
    places = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [*PLAIN, tmp_path, "--detach"],
        cwd=ROOT,
        env=outside_launchers() | places | {"MASTER_PORT": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 1
    assert "--detach is for a run without a launcher" in done.stderr
    assert not list(tmp_path.iterdir())


def handles(pid: int, number: int, how: str) -> bool:
    """Return whether a process ignores (`SigIgn`) or catches (`SigCgt`) a signal."""
    mask = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(how))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_program_signalled_during_imports_ends_with_one_line(number: signal.Signals) -> None:
    process = start([sys.executable, "-m", "megarl", "train"], "--check")
    while not handles(process.pid, signal.SIGHUP, "SigCgt"):
        time.sleep(0.001)
    process.send_signal(number)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == EXIT_CODE
    _, _, words = errors.partition("WARNING rank 0: ")
    assert words == f"{number.name}: there is nothing to save now; the job ends, and the same command starts it\n"


def test_programs_handle_signals_from_their_first_import() -> None:
    importing = re.compile("from megarl.commands.entry import (JobProgram, )?run\n")
    programs = [path for path in (ROOT / "megarl").rglob("*.py") if importing.search(path.read_text())]
    assert len(programs) > 4
    for path in programs:
        first = next(line for line in path.read_text().splitlines() if line.startswith("from megarl"))
        assert first.startswith("from megarl.platform import early"), path
