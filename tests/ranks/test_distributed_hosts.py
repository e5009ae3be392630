"""Ranks on two hosts find each other, whatever the names of the hosts; if they cannot, a message has the reason."""

import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from megarl.distributed import hosts
from megarl.distributed.hosts import await_listener, gather, resolve
from megarl.distributed.place import Launch
from tests.support.launchers import NEEDS_MPIRUN, outside_launchers
from tests.support.namespaces import Hosts, two_hosts, unavailable

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
ALSO_LONG = pytest.mark.parametrize(
    "pair",
    [pytest.param(False, id="known names", marks=pytest.mark.long), pytest.param(True, id="127.0.1.1")],
    indirect=True,
)
"""The names that are hard to resolve always, and the others in `make test-long`: Slurm's ranks meet by both names."""
MEETING = ["rank 0/2 0/1 env 0 2 0 1 sum 3", "rank 1/2 0/1 env 1 2 0 1 sum 3"]


@pytest.fixture(scope="module", params=[False, True], ids=["known names", "127.0.1.1"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := unavailable():
        pytest.skip(reason)
    with two_hosts(tmp_path_factory.mktemp("hosts"), names_are_loopback=request.param) as made:
        yield made


def meeting(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("rank "))


@ALSO_LONG
def test_torchrun_over_two_hosts(pair: Hosts) -> None:
    environ = outside_launchers() | {
        "PYTHON": sys.executable,
        "MODULE": "tests.support.launched",
        "GPUS_PER_NODE": "1",
        "NNODES": "2",
        "MASTER_ADDR": pair.names[0],
    }
    jobs = [
        pair.start(name, ["scripts/launch_torchrun.sh"], environ | {"NODE_RANK": str(number)})
        for number, name in enumerate(pair.names)
    ]
    outputs = [job.communicate(timeout=600)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(outputs)
    assert meeting("".join(outputs)) == MEETING


@ALSO_LONG
def test_two_hosts_are_examined(pair: Hosts, tmp_path: Path) -> None:
    """The hosts see each other and one directory; then each names a directory that the other does not have."""
    check = [sys.executable, "tools/host_check.py", ",".join(pair.names), "--directory"]

    environ = outside_launchers() | {"COLUMNS": "200"}  # so that no cell of a table is wrapped

    def examined(directories: list[Path]) -> tuple[list[int], list[str]]:
        named = zip(pair.names, directories, strict=True)
        jobs = [pair.start(name, [*check, directory], environ) for name, directory in named]
        outputs = [job.communicate(timeout=600)[0] for job in jobs]
        return [job.returncode for job in jobs], outputs

    codes, (first, second) = examined([tmp_path] * 2)
    assert codes == [0, 0], first + second
    assert all(f"host check of {name}" in first for name in pair.names)
    assert "These 2 hosts can train together." in first
    assert first.count("3 of 3 reached") == 2
    assert re.search(r"clock +\S [+-]0\.\d{3} s from ", first), first
    assert first.count("files of 2 hosts seen") == 2
    assert "host check of" not in second
    codes, (first, _) = examined([tmp_path / "a", tmp_path / "b"])
    assert codes == [1, 1]
    assert "These hosts cannot train together: 2 fault(s)" in first
    assert first.count("are not seen here") == 2


def test_slurm_tasks_meet_across_two_hosts(pair: Hosts) -> None:
    """Rank 1 finds the store although the name of its own host may be a loopback address there."""
    step = outside_launchers() | {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": ",".join(pair.names),
    }
    jobs = [
        pair.start(
            pair.names[rank // 2],
            [sys.executable, "-m", "tests.support.launched", "listens=yes"],
            step | {"SLURM_NODEID": f"{rank // 2}", "SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank % 2}"},
        )
        for rank in range(4)
    ]
    outputs = [job.communicate(timeout=600)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 4, "\n".join(outputs)
    assert [line.split()[-1] for line in meeting("".join(outputs))] == ["15"] * 4
    listening = {line.split()[2] for line in "".join(outputs).splitlines() if line.startswith("listens")}
    assert listening == {"10.77.31.1", "10.77.31.2"}


@NEEDS_MPIRUN
def test_mpirun_over_two_hosts_needs_no_settings(pair: Hosts, tmp_path: Path) -> None:
    """Run the README's line: no MASTER_ADDR, no exported variables."""
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in pair.names))
    mpirun = ["mpirun", "--allow-run-as-root", "--mca", "plm_rsh_agent", pair.agent, "-n", "2"]
    program = [sys.executable, "-m", "tests.support.launched", f"directory={tmp_path / 'run'}"]
    job = pair.start(pair.names[0], [*mpirun, "--hostfile", tmp_path / "hosts", *program], outside_launchers())
    output = job.communicate(timeout=600)[0]
    assert job.returncode == 0, output
    assert meeting(output) == MEETING


def test_unresolvable_host_is_named_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "REPORT_INTERVAL_S", 0.0)
    with pytest.raises(ValueError, match=r"no address of the host 'no\.such\.invalid'.*set MASTER_ADDR .*NodeAddr"):
        resolve("no.such.invalid")


OTHER_HOST = Launch(rank=2, world_size=4, local_rank=0, local_world_size=2)


def test_first_host_resolving_to_local_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "REPORT_INTERVAL_S", 0.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(ValueError, match=r"\(127\.0\.0\.1\), and nobody listens.*GLOO_SOCKET_IFNAME"):
            await_listener("127.0.0.1", port, OTHER_HOST, timeout_s=600)


def test_ranks_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(hosts, "REPORT_INTERVAL_S", 0.0)
    store = HashStore()
    for rank in (0, 3):
        store.set(f"megarl/seat/{rank}", "{}")
        store.add("megarl/seated", 1)
    with pytest.raises(ValueError, match=r"3 of 4 ranks have joined; missing: 1 \(host number 0 of 2.*set MASTER_ADDR"):
        gather(store, "127.0.0.1", OTHER_HOST, timeout_s=1.0)
    assert caplog.messages[0].startswith(
        "waiting at 127.0.0.1: 3 of 4 ranks have joined; missing: 1 (host number 0 of 2"
    )
