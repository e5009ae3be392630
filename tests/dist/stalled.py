"""A run of two ranks that comes to a halt: `python -m tests.dist.stalled REPORTS HOW`; rank 1 does it, in step 1.

HOW is `stop` (SIGSTOP), `sleep` (outside of any collective), `sleep-begun` (and the other rank has begun the collective
before it waits), `lock` (C code that keeps Python from running) or `apart` (both ranks wait, in
collectives of different groups).
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from megarl.distributed.launch import init_process_groups, join_or_launch
from megarl.distributed.watchdog import note, watching

TIMEOUT_S, GRACE_S = 10.0, 6.0


def main() -> None:
    reports, how = Path(sys.argv[1]), sys.argv[2]
    launch = join_or_launch("tests.dist.stalled", sys.argv[1:], num_processes=2)
    init_process_groups(launch, "cpu", timeout_s=600)
    other = dist.new_group(backend="gloo")
    place = {"rank": launch.rank, "world_size": launch.world_size}
    with watching(reports, **place, timeout_s=TIMEOUT_S, grace_s=GRACE_S):
        for step in range(3):
            note(step=step, phase="gen", rows=[4, 7])
            dist.barrier()
            note(phase="update_actor")
            if launch.rank == 1 and step == 1:
                halt(how, other)
            if how == "sleep-begun":
                work = dist.barrier(async_op=True)
                work.wait()
            else:
                dist.barrier()
    dist.destroy_process_group()


def halt(how: str, other: dist.ProcessGroup | None) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how in ("sleep", "sleep-begun"):
        time.sleep(600)
    elif how == "lock":
        ctypes.PyDLL(None).sleep(600)  # PyDLL: the call holds the interpreter's lock
    elif how == "apart":
        dist.barrier(group=other)


if __name__ == "__main__":
    main()
