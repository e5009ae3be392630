"""The rank of a process, read from the variables of torchrun, Open MPI or Slurm."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.platform.errors import UserError

MAX_PORT = 1 << 16
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process's rank among all ranks, and among the ranks of its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class WantedRanks:
    """The ranks that a command starts on this host if there is no launcher."""

    num_ranks: int
    device: str  # auto | cuda | cpu


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Return the rank that a launcher gave this process; None if no launcher started it.

    torchrun comes first and Slurm last, because torchrun and mpirun leave the variables of a Slurm job in place.

    Raises:
        UserError: a launcher's variables are incomplete, not numbers, or do not fit each other, or are of an MPI other
            than Open MPI.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _place(environ, *_TORCHRUN)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _place(environ, *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
    # Only srun sets the step's size. A batch script and `salloc` have SLURM_PROCID=0 too, but are not ranks. The shell
    # of `srun --pty bash`, a step of one task, is no rank either: training that starts there starts its own ranks.
    if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":  # D3
        here = "SLURM_STEP_TASKS_PER_NODE[SLURM_NODEID]"
        step = {**environ, here: _tasks_on_node(environ)}
        return _place(step, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", here)
    if "RANK" in environ:
        return _place(environ, *_TORCHRUN)  # which names those that are missing
    if environ.get("PMI_SIZE", "1") != "1":
        raise UserError(
            f"PMI_SIZE={environ['PMI_SIZE']} shows that an MPI other than Open MPI started this process: start one "
            "process per device with torchrun, mpirun of Open MPI or srun, or unset it to let megarl start them on "
            "this host"
        )
    return None


def restarted(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher started this job before: torchrun after a failure, Slurm after a requeue.

    Ranks may disagree: torchrun counts the failures of each host on that host.
    """
    counts = (environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count not in ("", "0") for count in counts)


def _place(environ: Mapping[str, str], *names: str) -> Launch:
    """Return the `Launch` whose fields, in order, are the numbers that `environ` has under `names`."""
    faults = [f"{name}={environ.get(name, '')!r}" for name in names if not environ.get(name, "").isdecimal()]
    if faults:
        raise UserError(
            f"{names[0]} shows that a launcher started this process, but {', '.join(faults)} is no number: start one "
            "process per device with torchrun, mpirun or srun, or unset these to let megarl start them on this host"
        )
    rank, world_size, local_rank, local_world_size = (int(environ[name]) for name in names)
    is_possible = rank < world_size and local_rank < local_world_size <= world_size
    if not is_possible:
        given = ", ".join(f"{name}={environ[name]}" for name in names)
        raise UserError(f"no rank of a job has {given}: a rank is below the number of ranks, on its host and in all")
    port = environ.get("MASTER_PORT", "1")
    least = 0 if world_size == 1 else 1  # 0 is any free port, which other ranks would not find
    is_port = port.isdecimal() and least <= int(port) < MAX_PORT
    if not is_port:
        raise UserError(f"MASTER_PORT={port!r} is no port: give a number from {least} to {MAX_PORT - 1}, or unset it")
    return Launch(rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size)


def _tasks_on_node(environ: Mapping[str, str]) -> str:
    """Return entry `SLURM_NODEID` of Slurm's run-length list of tasks per node (`4(x2),1` is 4, 4, 1), or ''."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [count for count, repeat in runs for _ in range(int(repeat or 1))]
    node = environ.get("SLURM_NODEID", "")
    return tasks[int(node)] if node.isdecimal() and int(node) < len(tasks) else ""
