"""The time of an exchange of windows among one rank of each replica, over gloo: `samples --exchange N`.

A process is a replica of one rank. Processes start as forks of this one, so that many of them start at once.

Times are medians of an exchange. Processes that outnumber the cores wait for a core, and so their time grows with
their number however few messages they send. So the processor time of the busiest rank is counted too.
"""

import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.samples_meter import counted
from benchmarks.samples_step import Exchange
from megarl.distributed.exchange import join_world
from megarl.platform.heap import keep_freed_memory

WARM_UP = 10
EXCHANGES = 200


def measure(num_ranks: int) -> dict[str, Any]:
    """Return the cost of an exchange among so many ranks: of the slowest rank, and of the busiest."""
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        directory = Path(name)
        mp.start_processes(_work, (num_ranks, directory), nprocs=num_ranks, start_method="fork")
        ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return {"num_ranks": num_ranks} | {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def _work(rank: int, num_ranks: int, directory: Path) -> None:
    """Exchange as one rank, and write what it costs."""
    torch.set_num_threads(1)
    keep_freed_memory()
    place = {"init_method": f"file://{directory}/rendezvous", "rank": rank, "world_size": num_ranks}
    join_world(timeout=timedelta(seconds=300), **place)
    exchange = Exchange(rank, num_ranks)
    for _ in range(WARM_UP):
        exchange.run()
    seconds, busy = [], []
    with counted() as sent:
        for _ in range(EXCHANGES):
            start, start_busy = time.perf_counter(), time.process_time()
            exchange.run()
            seconds.append(time.perf_counter() - start)
            busy.append(time.process_time() - start_busy)
    found = {
        "us": median(seconds) * 1e6,
        "cpu_us": median(busy) * 1e6,
        "messages": sent["messages"] / EXCHANGES,
        "bytes": sent["bytes"] / EXCHANGES,
    }
    (directory / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
