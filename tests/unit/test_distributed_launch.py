import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.distributed.hosts import describe_failure
from megarl.distributed.launch import Launch, detect, join, rendezvous, threads_of_rank
from megarl.platform.errors import UserError
from tests.support.programs import ROOT

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "2734358529",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_STEP_NODELIST": "gpu[007-008,012]",
}


def test_torchrun() -> None:
    assert detect(TORCHRUN) == Launch(rank=5, world_size=8, local_rank=1, local_world_size=4)


def test_open_mpi() -> None:
    assert detect(OPEN_MPI) == Launch(rank=1, world_size=2, local_rank=1, local_world_size=2)


@pytest.mark.parametrize(("node", "tasks"), [("0", 4), ("1", 4), ("2", 1)])
def test_slurm_reads_the_tasks_of_its_own_node(node: str, tasks: int) -> None:
    launch = detect({**SLURM, "SLURM_NODEID": node})
    assert launch == Launch(rank=8, world_size=9, local_rank=0, local_world_size=tasks)


def test_nothing_set_is_no_launcher() -> None:
    assert detect({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},  # a batch script
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
    ],
)
def test_a_slurm_shell_is_not_a_rank(environ: dict[str, str]) -> None:
    assert detect(environ) is None


def test_inner_launcher_wins_inside_a_slurm_job() -> None:
    launch = detect({**SLURM, **OPEN_MPI})
    assert launch is not None and launch.world_size == 2
    launch = detect({**SLURM, **OPEN_MPI, **TORCHRUN})
    assert launch is not None and launch.world_size == 8


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_incomplete_torchrun_variables_are_named(name: str) -> None:
    environ = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ValueError, match=f"RANK shows that a launcher.*{name}=''.*unset"):
        detect(environ)


@pytest.mark.parametrize(
    ("variables", "fault"),
    [
        ({"RANK": "8"}, "no rank of a job has RANK=8, WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "no rank of a job has .*LOCAL_RANK=4, LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "16"}, "no rank of a job has .*LOCAL_WORLD_SIZE=16"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is no port"),
        ({"MASTER_PORT": ""}, "MASTER_PORT='' is no port"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT='0' is no port: give a number from 1"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT='65536' is no port: give a number from 1 to 65535"),
    ],
)
def test_variables_that_do_not_fit_are_named(variables: dict[str, str], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        detect({**TORCHRUN, **variables})


def test_ranks_of_another_mpi_start_no_jobs() -> None:
    other = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    with pytest.raises(UserError, match="PMI_SIZE=2 shows that an MPI other than Open MPI.*or unset it"):
        detect(other)
    assert detect({**other, "PMI_SIZE": "1"}) is None
    assert detect({**other, **SLURM}) == detect(SLURM)  # srun --mpi=pmi2 sets both


def test_rank_that_is_alone_may_take_any_port() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "0"}
    assert detect(alone) == Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)


@pytest.mark.parametrize(("given", "threads"), [("3", 3), (" 4,2", 4)])
def test_threads_of_a_rank_are_those_given(given: str, threads: int) -> None:
    assert threads_of_rank({"OMP_NUM_THREADS": given}, 2) == threads


@pytest.mark.parametrize("given", ["", "0", "many", "-1"])
def test_ranks_share_cores_if_threads_are_no_number(given: str) -> None:
    assert threads_of_rank({"OMP_NUM_THREADS": given}, 1) == len(os.sched_getaffinity(0))
    assert threads_of_rank({"OMP_NUM_THREADS": given}, 4096) == threads_of_rank({}, 4096) == 1


def test_incomplete_slurm_step_is_named() -> None:
    with pytest.raises(ValueError, match="SLURM_STEP_TASKS_PER_NODE"):
        detect({**SLURM, "SLURM_NODEID": "3"})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node001", "node001"),
        ("node[001-004,007]", "node001"),
        ("gpu[012,003]-ib,login1", "gpu012-ib"),
        ("rack[1-2]n[05-10]", "rack1n05"),
        ("a,b[1-2]", "a"),
    ],
)
def test_slurm_rank_0_is_on_the_first_host(nodelist: str, host: str) -> None:
    launch = Launch(rank=0, world_size=8, local_rank=0, local_world_size=4)
    assert rendezvous({**SLURM, "SLURM_STEP_NODELIST": nodelist}, launch, Path())[0] == host


def test_port_is_that_of_the_job_step() -> None:
    launch = Launch(rank=0, world_size=9, local_rank=0, local_world_size=4)
    port = rendezvous(SLURM, launch, Path())[1]
    assert 20000 <= port < 30000
    assert rendezvous({**SLURM, "SLURM_PROCID": "1", "SLURM_NODEID": "0"}, launch, Path())[1] == port
    assert rendezvous({**SLURM, "SLURM_STEP_ID": "1"}, launch, Path())[1] != port


def test_open_mpi_on_one_host_meets_on_loopback() -> None:
    launch = Launch(rank=1, world_size=2, local_rank=1, local_world_size=2)
    assert rendezvous(OPEN_MPI, launch, Path())[0] == "127.0.0.1"


def test_open_mpi_across_hosts_accepts_given_address() -> None:
    launch = Launch(rank=1, world_size=4, local_rank=1, local_world_size=2)
    environ = {**OPEN_MPI, "MASTER_ADDR": "node7", "MASTER_PORT": "123"}
    assert rendezvous(environ, launch, Path()) == ("node7", 123)


@pytest.mark.parametrize(
    "place",
    [
        Launch(rank=1, world_size=4, local_rank=0, local_world_size=2),  # ranks by turns on the hosts
        Launch(rank=4, world_size=8, local_rank=2, local_world_size=4),  # two by two
        Launch(rank=0, world_size=6, local_rank=0, local_world_size=4),  # 4 and 2
    ],
)
def test_ranks_that_do_not_fill_hosts_are_named(place: Launch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"rank {place.rank} of .* consecutive ones.*--map-by slot"):
        join(place, tmp_path)


def test_failure_is_described_if_host_is_forgotten() -> None:
    message = describe_failure(RuntimeError("connection reset\nby peer"), "rank0.invalid", 29500)
    assert "MASTER_ADDR=rank0.invalid (), MASTER_PORT=29500" in message and ": connection reset. Remedy: " in message


def test_open_mpi_hosts_meet_at_rank_0_address(tmp_path: Path) -> None:
    first = Launch(rank=0, world_size=4, local_rank=0, local_world_size=2)
    address, port = rendezvous(OPEN_MPI, first, tmp_path / "run")
    with socket.create_server((address, port)):
        other = Launch(rank=2, world_size=4, local_rank=0, local_world_size=2)
        assert rendezvous(OPEN_MPI, other, tmp_path / "run") == (address, port)


LIMITED = """
import resource, sys
from megarl.distributed.launch import allow_connections

soft, hard, world = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    allow_connections(world)
except ValueError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("world", "fault"),
    [(8, ""), (128, ""), (129, "a process may open 512 files here, and a rank among 129 needs at least 514: raise")],
)
def test_open_file_limit_is_raised_or_named(world: int, fault: str) -> None:
    command = [sys.executable, "-c", LIMITED, "64", "512", str(world)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()
    assert lines[-1] == "(512, 512)"
    assert "".join(lines[:-1]).startswith(fault) and bool(fault) == (len(lines) == 2)
