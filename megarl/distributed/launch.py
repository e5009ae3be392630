"""How a process learns its rank: from torchrun, Open MPI or Slurm, or by starting the ranks of this host itself.

Invariant: when `join_or_launch` returns, the environment holds torch's own names (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
`LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`) whatever started the process, so nothing after it knows launchers.
"""

import atexit
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from megarl.distributed.signals import forward
from megarl.distributed.store import meet
from megarl.platform.processes import die_with_parent, follow_parent

LINGER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process's place among all ranks, and among those of its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def detect(environ: Mapping[str, str]) -> Launch | None:
    """The place a launcher gave this process, or None where it was started plainly.

    torchrun comes first and Slurm last: torchrun and mpirun run inside Slurm jobs, whose variables they leave in place.

    Raises:
        ValueError: a launcher's variables are there but incomplete, or not numbers.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _place(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _place(environ, *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
    # Only srun sets the step's size; a batch script and `salloc` have SLURM_PROCID=0 too, but are not ranks. Neither
    # is the shell of `srun --pty bash`, a step of one task: training started there starts its own ranks.
    if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        here = "SLURM_STEP_TASKS_PER_NODE[SLURM_NODEID]"
        step = {**environ, here: _tasks_on_node(environ)}
        return _place(step, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", here)
    return None


def restarted(environ: Mapping[str, str]) -> bool:
    """Whether a launcher says that it has started this job before: torchrun after a failure, Slurm after a requeue.

    Only some ranks may be told: torchrun counts on each host what failed there.
    """
    counts = (environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count not in ("", "0") for count in counts)


def rendezvous(environ: Mapping[str, str], launch: Launch) -> tuple[str, int]:
    """Where rank 0 listens: what `MASTER_ADDR` and `MASTER_PORT` say, else what the launcher's variables imply.

    The port is a number that all ranks of one job can compute and two jobs on a host hardly share.

    Raises:
        ValueError: Open MPI spans hosts and nobody said which one rank 0 is on.
    """
    if "OMPI_COMM_WORLD_RANK" in environ:
        job = environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", ""))
        host = "127.0.0.1" if launch.local_world_size == launch.world_size else ""
    else:
        job = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
        host = _first_host(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_NODELIST", "")))
    host = environ.get("MASTER_ADDR", host)
    if not host:
        raise ValueError("MASTER_ADDR is not set: name the host of rank 0, e.g. mpirun -x MASTER_ADDR=node001 ...")
    return host, int(environ.get("MASTER_PORT", 20000 + zlib.crc32(job.encode()) % 10000))


def join_or_launch(module: str, argv: Sequence[str], *, num_processes: int) -> Launch:
    """Return this process's place under its launcher; without one, run `python -m module argv` on local ranks and exit.

    Args:
        module: the entry point that called this, e.g. `megarl.train`.
        argv: its command-line arguments.
        num_processes: ranks to start on this host when no launcher did.
    """
    launch = detect(os.environ)
    if launch is None:
        _launch(module, argv, num_processes=num_processes)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)  # of the agent that watches it, as nobody else would then
    elif "OMPI_COMM_WORLD_RANK" in os.environ:
        follow_parent()  # Open MPI 4 leaves ranks behind when it is killed, and may start many in threads
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        host, port = rendezvous(os.environ, launch)
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    for name in ("rank", "world_size", "local_rank", "local_world_size"):
        os.environ[name.upper()] = str(getattr(launch, name))
    return launch


def init_process_groups(launch: Launch, device_type: str, timeout_s: float) -> None:
    """Create torch's default process group; on CUDA it carries host tensors too (gloo).

    A process that ends without destroying it has failed, and ends with code 1.

    Args:
        launch: what `join_or_launch` returned.
        device_type: `cpu` or `cuda`, what this job trains on.
        timeout_s: seconds after which a collective that a rank does not join is an error.

    Raises:
        ValueError: this host shows the process fewer CUDA devices than it has ranks.
    """
    if device_type == "cuda":
        num_devices = torch.cuda.device_count()
        if launch.local_rank >= num_devices:
            raise ValueError(
                f"rank {launch.rank} is number {launch.local_rank} on its host and needs CUDA device "
                f"{launch.local_rank}, but sees {num_devices}: start at most one process per device "
                "(trainer.n_gpus_per_node) and let each see them all (Slurm: --gpus-per-node, not --gpus-per-task)"
            )
        torch.cuda.set_device(launch.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        store=meet(launch.rank, launch.world_size, timeout_s=timeout_s),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    atexit.register(_leave)


def _place(environ: Mapping[str, str], *names: str) -> Launch:
    """The `Launch` whose fields, in order, are the numbers that `environ` has under `names`."""
    faults = [f"{name}={environ.get(name, '')!r}" for name in names if not environ.get(name, "").isdecimal()]
    if faults:
        raise ValueError(
            f"{names[0]} says that a launcher started this process, but {', '.join(faults)} is no number: start one "
            "process per device with torchrun, mpirun or srun, or unset these to let megarl start them on this host"
        )
    rank, world_size, local_rank, local_world_size = (int(environ[name]) for name in names)
    return Launch(rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size)


def _tasks_on_node(environ: Mapping[str, str]) -> str:
    """Entry `SLURM_NODEID` of Slurm's run-length list of tasks per node (`4(x2),1` is 4, 4, 1); empty if not there."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [count for count, repeat in runs for _ in range(int(repeat or 1))]
    node = environ.get("SLURM_NODEID", "")
    return tasks[int(node)] if node.isdecimal() and int(node) < len(tasks) else ""


def _first_host(nodelist: str) -> str:
    """The host of task 0: the first that a Slurm list such as `gpu[001-004,007],login1` names."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodelist).split(",")[0]


def _launch(module: str, argv: Sequence[str], *, num_processes: int) -> NoReturn:
    """Run this host's ranks under torch's elastic agent; exit with the code of the first that failed, or 0."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_processes)))
    # The address is given since the agent would otherwise look its own host name up, which laptops may not resolve.
    agent = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(num_processes)]
    if sys.platform == "linux":  # the agent would give the ranks 30 s after SIGTERM, and die of SIGUSR1
        agent += ["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"]
        forward()
    try:
        run(parse_args([*agent, "--module", module, *argv]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode  # a signal, as a shell counts it
        print(f"megarl: rank {rank} failed first (exit code {code}); its own messages are above", file=sys.stderr)
        sys.exit(code)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit(0)


def _leave() -> None:
    """End a process that failed before the interpreter unloads: gloo's threads would abort it (SIGABRT), not always.

    It lingers, so that a rank which only lost its peer does not end before the launcher has seen the peer's end.
    """
    if dist.is_initialized():
        time.sleep(LINGER_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
