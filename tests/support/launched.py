"""The smallest entry point for tests of launchers: sum 2**rank over all ranks and print one line per rank.

`fail=R` raises on rank R after the ranks have met, while the others wait in a collective. `kill=R` kills that rank.
`once=yes` fails only before the first restart, after which rank 0 comes late. `hang=yes` makes every rank wait forever.
`listens=yes` prints the addresses of the listening sockets of the job.
"""

import os
import signal
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from megarl.distributed.launch import detect, init_process_groups, join, start
from megarl.distributed.place import WantedRanks

LATE_S = 2.0  # long enough to find the stale address of a dead rank


def main() -> None:
    options = dict(argument.split("=") for argument in sys.argv[1:])
    wanted = WantedRanks(int(options.get("ranks", 2)), options.get("device", "cpu"))
    launch = detect(os.environ) or start("tests.support.launched", sys.argv[1:], wanted)
    join(launch, Path(options.get("directory", ".")))
    if "once" in options and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        del options["kill"]
        time.sleep(LATE_S if launch.rank == 0 else 0.0)
    init_process_groups(launch, timeout_s=60)
    total = torch.tensor(2**launch.rank)
    dist.all_reduce(total)
    place = f"{launch.rank}/{launch.world_size} {launch.local_rank}/{launch.local_world_size}"
    exported = " ".join(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if "listens" in options:
        for found in psutil.Process().net_connections("inet"):
            if found.status == psutil.CONN_LISTEN:
                sys.stdout.write(f"listens {launch.rank} {found.laddr.ip}\n")
    sys.stdout.write(f"rank {place} env {exported} sum {total.item()}\n")  # one write: ranks share the pipe
    sys.stdout.flush()
    if options.get("fail") == str(launch.rank):
        raise ValueError(f"rank {launch.rank} was asked to fail")
    if options.get("kill") == str(launch.rank):
        os.kill(os.getpid(), signal.SIGKILL)
    if "hang" in options:
        signal.pause()
    if {"fail", "kill"} & options.keys():
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
