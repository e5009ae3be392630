"""A run of two ranks that comes to a halt: `python -m tests.dist.stalled REPORTS HOW`; rank 1 does it, in step 1.

HOW is `stop` (SIGSTOP), `sleep` (outside of any collective), `sleep-begun` (and the other rank has begun the collective
before it waits), `lock` (C code that keeps Python from running), `apart` (both ranks wait, in
collectives of different groups), `slow-rewards` (twice as long as a phase may take, one after the other) or
`hung-rewards` (the process that calls them is stopped).
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from megarl.distributed.launch import init_process_groups, join_or_launch
from megarl.distributed.watchdog import note, watching
from megarl.platform.processes import children
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rewards.scoring import Scorer
from tests.records import answer, prompts

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
            if how.endswith("rewards") and step == 1:
                score(launch.rank, hangs=how == "hung-rewards")
            elif launch.rank == 1 and step == 1:
                halt(how, other)
            if how == "sleep-begun":
                work = dist.barrier(async_op=True)
                work.wait()
            else:
                dist.barrier()
    dist.destroy_process_group()


def score(rank: int, *, hangs: bool) -> None:
    """Have rank 1 alone score responses, each well within its time, and the first before the phase begins."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "mine.py"
        path.write_text(f"import time\ndef compute_score(**_):\n    time.sleep({TIMEOUT_S / 5})\n    return 1.0\n")
        section = RulesSection(num_workers=1, timeout_s=600.0)
        scorer = Scorer.make(section, CustomRewardSection(path=str(path)), lambda token_ids: "")
        responses = answer(prompts([1]), [1] * 10)
        for rollouts, phase in ((responses.select(torch.tensor([0])), "first reward"), (responses, "reward")):
            note(phase=phase)
            for sample in range(len(rollouts) if rank == 1 else 0):
                scorer.begin(rollouts.prompt_of(sample), rollouts.response_ids(sample))
            if hangs and phase == "reward":
                for pid in children():
                    os.kill(pid, signal.SIGSTOP)
            scorer.score(rollouts)
        scorer.pool.close()


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
