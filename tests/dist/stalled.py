"""A run of two ranks that comes to a halt: `python -m tests.dist.stalled RUN_DIR HOW`; rank 1 does it, in step 1.

HOW is `stop` (SIGSTOP), `sleep` (outside of any collective), `lock` (C code that keeps Python from running) or `apart`
(both ranks wait, in collectives of different groups).
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from megarl.distributed.launch import init_process_groups, join_or_launch
from megarl.distributed.watchdog import Watchdog, forget

TIMEOUT_S, GRACE_S = 10.0, 6.0


def main() -> None:
    run_dir, how = Path(sys.argv[1]), sys.argv[2]
    launch = join_or_launch("tests.dist.stalled", sys.argv[1:], num_processes=2)
    init_process_groups(launch, "cpu", timeout_s=600)
    other = dist.new_group(backend="gloo")
    if launch.rank == 0:
        forget(run_dir)
    dist.barrier()
    watchdog = Watchdog(
        run_dir, rank=launch.rank, world_size=launch.world_size, timeout_s=TIMEOUT_S, grace_s=GRACE_S
    )
    watchdog.start()
    for step in range(3):
        watchdog.enter("gen", step=step, samples=[4, 7])
        dist.barrier()
        watchdog.enter("update_actor", step=step, samples=[4, 7])
        if launch.rank == 1 and step == 1:
            halt(how, other)
        dist.barrier()
    watchdog.stop()
    dist.destroy_process_group()


def halt(how: str, other: dist.ProcessGroup | None) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "sleep":
        time.sleep(600)
    elif how == "lock":
        ctypes.PyDLL(None).sleep(600)  # PyDLL: the call holds the interpreter's lock
    elif how == "apart":
        dist.barrier(group=other)


if __name__ == "__main__":
    main()
