"""A Slurm cluster on this machine: the real controller and daemons, two nodes, in a directory of its own."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.programs import ROOT, SHOWN_CHARACTERS

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "srun")
NODES = ("n1", "n2")
DEVICES = ("/dev/null", "/dev/zero")  # what Slurm takes for the GPUs of a node
CONF = """
ClusterName=megarl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
ReturnToService=2
{gres}
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def unavailable() -> str:
    """Return why no such cluster can be started here; empty if it can."""
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"{', '.join(missing)} not found: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "only root starts Slurm's daemons"


@dataclass(frozen=True)
class Slurm:
    """A running cluster."""

    root: Path
    environ: dict[str, str]

    def call(self, *command: object) -> str:
        """Run one of Slurm's commands and return what it prints."""
        done = subprocess.run(
            list(map(str, command)), env=self.environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{command}: {done.stderr}{self.logs()}"
        return done.stdout

    def submit(self, script: Path, *arguments: object, options: Sequence[object]) -> str:
        """Submit a batch script and return the number of its job."""
        printed = self.call("sbatch", "--parsable", *options, script, *arguments)
        return printed.strip().split(";")[0]

    def field(self, job: str, name: str) -> str:
        """Return a field of a job, as `scontrol show job` shows it."""
        found = re.search(rf"\b{name}=(\S+)", self.call("scontrol", "show", "job", job))
        assert found, name
        return found[1]

    def wait(self, job: str, condition: Callable[[], bool], *, output: Path, timeout_s: float) -> None:
        """Wait for the condition. Raises AssertionError with the job's output if it fails or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            state = self.field(job, "JobState")
            printed = output.read_text()[-SHOWN_CHARACTERS:] if output.exists() else ""
            assert state not in ("FAILED", "CANCELLED", "NODE_FAIL"), f"{state}\n{printed}{self.logs()}"
            assert time.monotonic() < deadline, f"{state} after {timeout_s} s\n{printed}{self.logs()}"
            time.sleep(0.5)

    def logs(self) -> str:
        """Return the ends of what the daemons printed."""
        return "\n".join(f"\n{path.name}:\n{path.read_text()[-1000:]}" for path in sorted(self.root.glob("*.log")))


@contextmanager
def slurm(*, gpus_per_node: int) -> Iterator[Slurm]:
    """Start a cluster of two nodes of two processors each, and end it with all its jobs.

    The files of the cluster are not below `TMPDIR`: the name of a socket has 108 bytes at most, and blanks separate
    Slurm's settings.

    Args:
        gpus_per_node: what the cluster counts as GPUs (GRES); 0 for a cluster that knows of no GPUs.
    """
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as root,
        _cluster(Path(root), gpus_per_node) as cluster,
    ):
        yield cluster


@contextmanager
def _cluster(root: Path, gpus_per_node: int) -> Iterator[Slurm]:
    host, ports = socket.gethostname(), _free_ports(1 + len(NODES))
    gres = f" Gres=gpu:{gpus_per_node}" if gpus_per_node else ""
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN{gres}"
        for name, port in zip(NODES, ports[1:], strict=True)
    )
    conf = CONF.format(
        host=host,
        controller=ports[0],
        root=root,
        nodes=nodes,
        names=",".join(NODES),
        gres="GresTypes=gpu" if gpus_per_node else "",
    )
    (root / "slurm.conf").write_text(conf)
    (root / "gres.conf").write_text(f"Name=gpu File={','.join(DEVICES[:gpus_per_node])}\n" if gpus_per_node else "")
    (root / "state").mkdir()
    key = root / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    munge = [f"--{what}-file={root}/munge.{what}" for what in ("key", "pid", "seed")]
    munge += [f"--socket={root}/munge.socket", "--force", "--foreground", f"--log-file={root}/munged.log"]
    cluster = Slurm(root, os.environ | {"SLURM_CONF": str(root / "slurm.conf"), "PYTHONPATH": str(ROOT)})
    with ExitStack() as daemons:
        daemons.enter_context(_daemon(cluster, "munged", *munge))
        _wait_until((root / "munge.socket").exists, cluster)
        daemons.enter_context(_daemon(cluster, "slurmctld", "-D"))
        for name in NODES:
            daemons.enter_context(_daemon(cluster, "slurmd", "-D", "-N", name))
        _wait_until(lambda: _idle_nodes(cluster) == len(NODES), cluster)
        try:
            yield cluster
        finally:
            cluster.call("scancel", "--user=root")
            _wait_until(lambda: not cluster.call("squeue", "--noheader").strip(), cluster)


@contextmanager
def _daemon(cluster: Slurm, name: str, *arguments: str) -> Iterator[None]:
    log = cluster.root / f"{name}-{arguments[-1].strip('-').replace('/', '_')[:20]}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(shutil.which(name)), *arguments], env=cluster.environ, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle_nodes(cluster: Slurm) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        env=cluster.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stdout.split().count("idle")


def _wait_until(condition: Callable[[], bool], cluster: Slurm, *, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for one in bound:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in bound]
