"""Joining the ranks of torchrun, Open MPI or Slurm, or starting the ranks of this host without a launcher.

Invariant: when `join` returns, the environment holds torch's own variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
`LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`) under every launcher. Later code knows no launchers.
"""

import atexit
import os
import re
import resource
import signal
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import Store

from megarl.distributed.agent import serve
from megarl.distributed.exchange import join_world
from megarl.distributed.hosts import announce, choose_interface, describe_failure, find_announced, gather
from megarl.distributed.local import fork_ranks
from megarl.distributed.place import Launch, WantedRanks, detect, restarted
from megarl.distributed.store import meet
from megarl.platform.device import decide_device, on_cuda
from megarl.platform.errors import UserError
from megarl.platform.forking import run_in_child
from megarl.platform.processes import die_with_parent, follow_parent
from megarl.platform.terminal import COMMAND, typed

__all__ = ["Launch", "WantedRanks", "detect", "init_process_groups", "join", "rendezvous", "restarted", "start"]

LINGER_S = 1.0
FILES_OF_A_RANK = 256
"""Open files of a rank without its connections: libraries, data, devices, logs."""
FILES_OF_A_PEER = 2
"""Open files of a rank for each other rank, at least: a group of gloo connects each of its ranks with each other, and
the store has a connection to each rank. Smaller groups need more."""
MEETING_S = 1800.0
"""Seconds that ranks look for rank 0 if they know its address only from a file of the run."""


def rendezvous(environ: Mapping[str, str], launch: Launch, directory: Path) -> tuple[str, int]:
    """Return host and port of rank 0: `MASTER_ADDR` and `MASTER_PORT`, else what the launcher's variables imply.

    All ranks of a job compute the same port, and two jobs on a host rarely share it. Open MPI does not give ranks the
    host of rank 0. If such a job spans hosts, rank 0 writes its address into a file of `directory`.

    Raises:
        UserError: rank 0 does not listen at the address that it wrote.
    """
    if "OMPI_COMM_WORLD_RANK" in environ:
        job = environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", ""))
        host = "127.0.0.1" if launch.local_world_size == launch.world_size else ""
    else:
        job = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
        host = _first_host(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_NODELIST", "")))
    port = int(environ.get("MASTER_PORT", 20000 + zlib.crc32(job.encode()) % 10000))
    host = environ.get("MASTER_ADDR", host)
    if host:
        return host, port
    path = directory / f".rank0-{zlib.crc32(job.encode())}.part"  # a resumed job removes a left-over file
    if launch.rank == 0:
        return announce(path, port)
    return find_announced(path, launch, timeout_s=MEETING_S)


def start(module: str, argv: Sequence[str], wanted: WantedRanks, *, imports: Sequence[str] = ()) -> Launch:
    """Start ranks on this host, for a command that no launcher started.

    Ranks on the CPU of Linux are forked, and this returns in each of them. On CUDA, which does not survive a fork, and
    on other systems `python -m module argv` starts anew for each rank. The first process ends when all ranks have.

    Args:
        module: the entry point, e.g. `megarl train`.
        argv: the command-line arguments of the entry point.
        wanted: the ranks.
        imports: modules that every rank needs.

    Raises:
        UserError: `decide_device` raises it.
    """
    threads = threads_of_rank(os.environ, wanted.num_ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ[COMMAND] = typed()
    if sys.platform == "linux" and run_in_child(partial(decide_device, wanted.device)) == "cpu":
        return fork_ranks(wanted.num_ranks, imports, threads=threads)
    # Without the address the agent looks up its own host name, which laptops may not resolve.
    agent = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(wanted.num_ranks)]
    return serve([*agent, "--module", module, *argv])


def threads_of_rank(environ: Mapping[str, str], num_ranks: int) -> int:
    """Return the threads of a rank's products: the first number of `OMP_NUM_THREADS`, else its share of the cores."""
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdecimal() and int(given) > 0:
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_ranks)


def join(launch: Launch, directory: Path) -> None:
    """Set torch's variables for this rank, under whatever launcher; end this rank with its launcher.

    `directory` is a directory that all hosts see, through which ranks may have to find each other.

    Raises:
        UserError: hosts have different numbers of ranks, or ranks that are not consecutive; or as of `rendezvous`.
    """
    ranks_here = launch.local_world_size
    if launch.rank % ranks_here != launch.local_rank or launch.world_size % ranks_here:
        raise UserError(
            f"rank {launch.rank} of {launch.world_size} is number {launch.local_rank} of {ranks_here} on its host: all "
            "hosts must have the same number of ranks, and a host consecutive ones (Slurm: --ntasks-per-node and "
            "--distribution=block; mpirun: --map-by slot)"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)  # the parent is the agent that watches this rank; nobody else would then
    elif "OMPI_COMM_WORLD_RANK" in os.environ:
        follow_parent()  # Open MPI 4 leaves ranks behind when it is killed, and may start many in threads
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        host, port = rendezvous(os.environ, launch, directory)
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    for name in ("rank", "world_size", "local_rank", "local_world_size"):
        os.environ[name.upper()] = str(getattr(launch, name))


def allow_connections(world_size: int) -> None:
    """Let this process open as many files as its hard limit permits.

    Raises:
        UserError: the hard limit is below what `world_size` ranks need.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    needed = FILES_OF_A_RANK + FILES_OF_A_PEER * world_size
    if most != resource.RLIM_INFINITY and most < needed:
        raise UserError(
            f"a process may open {most} files here, and a rank among {world_size} needs at least {needed}: raise the "
            "hard limit (`ulimit -Hn`; LimitNOFILE of the service that starts the job; --ulimit nofile of a container)"
        )


def init_process_groups(launch: Launch, timeout_s: float) -> Store:
    """Create torch's default process group, and on CUDA a group for data in host memory (see `exchange.join_world`).

    Return the store in which the ranks met.

    A process that ends without destroying the group has failed, and exits with code 1.

    Args:
        launch: the place of this rank.
        timeout_s: seconds after which a collective is an error if a rank has not joined it.

    Raises:
        UserError: the process sees fewer CUDA devices than this host has ranks, may open too few files, or the ranks
            cannot find or reach each other.
    """
    allow_connections(launch.world_size)
    if on_cuda():
        num_devices = torch.cuda.device_count()
        if launch.local_rank >= num_devices:
            raise UserError(
                f"rank {launch.rank} is number {launch.local_rank} on its host and needs CUDA device "
                f"{launch.local_rank}, but sees {num_devices} devices: start at most one process per device "
                "(trainer.n_gpus_per_node) and let each see them all (Slurm: --gpus-per-node, not --gpus-per-task)"
            )
        torch.cuda.set_device(launch.local_rank)
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = meet(launch, host, port, timeout_s=timeout_s)
    choose_interface(store, gather(store, host, launch, timeout_s=timeout_s), launch)
    try:
        join_world(store=store, rank=launch.rank, world_size=launch.world_size, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise UserError(describe_failure(error, host, port)) from error
    atexit.register(_leave)
    return store


def _first_host(nodelist: str) -> str:
    """Return the host of task 0: the first host in a Slurm list such as `gpu[001-004,007],login1`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodelist).split(",")[0]


def _leave() -> None:
    """End a failed process before the interpreter unloads, because gloo's threads would sometimes abort it (SIGABRT).

    Wait first, so that a rank that only lost its peer does not end before the launcher has seen the peer end.
    """
    if dist.is_initialized():
        time.sleep(LINGER_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
