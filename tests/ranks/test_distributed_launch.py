import os
import signal
import socket
import subprocess
import sys

import psutil  # type: ignore[import-untyped]
import pytest

from megarl.distributed.place import Launch
from megarl.distributed.store import meet
from megarl.platform.errors import UserError
from tests.support.launchers import NEEDS_MPIRUN, start

MODULE = ["-m", "tests.support.launched"]
PLAIN = [sys.executable, *MODULE]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *MODULE]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, *MODULE]
EVERY_LAUNCHER = pytest.mark.parametrize(
    "command",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(TORCHRUN, id="torchrun"),
        pytest.param(MPIRUN, id="mpirun", marks=NEEDS_MPIRUN),
    ],
)
MEETING = ["rank 0/2 0/2 env 0 2 0 2 sum 3", "rank 1/2 1/2 env 1 2 1 2 sum 3"]
pytestmark = pytest.mark.ranks


def lines_of_ranks(*processes: subprocess.Popen[str]) -> list[str]:
    """Return the output of the ranks, after all `processes` have succeeded."""
    lines = []
    for process in processes:
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        lines += [line for line in stdout.splitlines() if line.startswith("rank")]
    return sorted(lines)


def test_two_tasks_of_a_slurm_step_meet() -> None:
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }
    tasks = [start(PLAIN, environ={**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in ("0", "1")]
    assert lines_of_ranks(*tasks) == MEETING


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("launch_torchrun.sh", {"GPUS_PER_NODE": "2"}),
        pytest.param(
            "launch_mpirun.sh", {"HOSTS": "localhost:2", "MPIRUN_ARGS": "--oversubscribe"}, marks=NEEDS_MPIRUN
        ),
    ],
)
def test_launch_scripts(script: str, ranks: dict[str, str]) -> None:
    environ = {"PYTHON": sys.executable, "MODULE": "tests.support.launched", **ranks}
    assert lines_of_ranks(start([f"scripts/{script}"], environ=environ)) == MEETING


@EVERY_LAUNCHER
def test_failing_rank_fails_job_and_shows_error(command: list[str]) -> None:
    process = start(command, "fail=1")
    stdout, stderr = process.communicate(timeout=120)
    assert sorted(line for line in stdout.splitlines() if line.startswith("rank")) == MEETING
    assert process.returncode == 1
    assert "ValueError: rank 1 was asked to fail" in stderr + stdout


@pytest.mark.parametrize(
    "command", [pytest.param(PLAIN, id="plain"), pytest.param(MPIRUN, id="mpirun", marks=NEEDS_MPIRUN)]
)
def test_single_host_job_binds_store_to_loopback_only(command: list[str]) -> None:
    stdout, stderr = start(command, "listens=yes").communicate(timeout=120)
    listening = {line.split()[2] for line in stdout.splitlines() if line.startswith("listens")}
    assert "127.0.0.1" in listening, stderr
    assert not listening & {"0.0.0.0", "::"}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_store_listens_at_requested_address(host: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = {found.laddr for found in psutil.Process().net_connections("inet")}
    store = meet(Launch(rank=0, world_size=2, local_rank=0, local_world_size=2), host, port, timeout_s=30)
    mine = [found.laddr for found in psutil.Process().net_connections("inet") if found.status == psutil.CONN_LISTEN]
    assert {place.ip for place in mine if place not in before} <= {"127.0.0.1", "::1"}
    assert port in {place.port for place in mine}
    with pytest.raises(UserError, match="Address already in use"):
        meet(Launch(rank=0, world_size=2, local_rank=0, local_world_size=2), host, port, timeout_s=30)
    del store


@pytest.mark.faults
def test_killed_rank_is_named_and_sets_exit_code() -> None:
    process = start(PLAIN, "kill=1")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGKILL
    assert "megarl: rank 1 failed first (exit code 137); unless someone killed it, memory probably ran out" in stderr


@pytest.mark.faults
def test_ranks_that_torchrun_starts_again_find_each_other() -> None:
    torchrun = [*TORCHRUN[:3], "--max-restarts=1", *TORCHRUN[3:]]
    process = start(torchrun, "kill=1", "once=yes")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert sorted(stdout.splitlines()) == sorted(2 * MEETING)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills ranks with the agent that watches them")
def test_ranks_do_not_outlive_a_killed_agent() -> None:
    process = start(PLAIN, "hang=yes")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("rank")
    assert process.stdout.readline().startswith("rank")
    process.kill()
    process.communicate(timeout=60)  # returns when the last rank has closed the pipe: a rank left behind would not


def test_terminated_job_exits_with_signal_code() -> None:
    process = start(PLAIN, "hang=yes")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("rank")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
