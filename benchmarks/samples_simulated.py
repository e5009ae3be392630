"""The step of one rank in a world of many ranks that do not exist: `samples --simulate R`.

The rank runs the code of a run. A transport takes the place of torch's: it counts what would travel, and every other
rank seems to be like this one. The time of a network is not in the seconds, and no message waits for another rank.
"""

import json
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.testing._internal.distributed import fake_pg

from benchmarks import samples_step
from benchmarks.samples_step import STEP, Case, Exchange, first_step, job_of
from megarl.data.order import Position
from megarl.distributed import redistribution
from megarl.distributed.exchange import REDUCED
from megarl.distributed.sharded import Index, Sharded, Shares
from megarl.learner.packing import partition
from megarl.platform.heap import keep_freed_memory
from megarl.tracking.timers import Timers
from megarl.training.loop import take_step

BYTE = 1  # of all that other ranks send: a token, a true flag, a small number, and the version of this step
REPEATS = 9
SPOTS: dict[str, tuple[object, str]] = {
    "of_groups": (samples_step, "of_groups"),
    "partition": (samples_step, "partition"),
    "send": (redistribution, "_send"),
    "receive": (redistribution, "_receive"),
    "unpack": (redistribution._Layout, "unpack"),
    "sum": (Sharded, "sum"),
}
"""Parts of the step that are timed, and where the code of a run finds them."""


class Transport:
    """Counts the traffic of one rank. It has the functions of `torch.distributed` that a step and an exchange call."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self._sent = torch.empty(0)

    def isend(self, content: Tensor, *_: Any, tag: int = 0, **__: Any) -> "Transport":
        """Count a message; the transport itself stands for a transfer that is done."""
        self._count(content, "bytes_sent", tag)
        self._sent = content
        return self

    def irecv(self, content: Tensor, *_: Any, tag: int = 0, **__: Any) -> "Transport":
        """Receive samples of another rank, or in a round of a collective what this rank has sent in it."""
        self._count(content, "bytes_received", tag)
        if tag:
            content.copy_(self._sent)
        else:
            content.fill_(BYTE)
        return self

    def wait(self) -> None:
        """Return: every transfer is done."""

    def all_gather_object(self, found: list[Any], mine: Any, **_: Any) -> None:
        """Give every rank's place an object that is read from bytes, as in a run."""
        content = pickle.dumps(mine)
        self.counts["collectives"] += 1
        self.counts["bytes_gathered"] += len(content) * len(found)
        found[:] = [pickle.loads(content) for _ in found]  # noqa: S301 - our own bytes

    def barrier(self, *_: Any, **__: Any) -> None:
        """Count a barrier."""
        self.counts["collectives"] += 1

    def _count(self, content: Tensor, direction: str, tag: int) -> None:
        is_reduction = tag == REDUCED
        self.counts["reductions" if is_reduction else "messages"] += 1
        self.counts["bytes_reduced" if is_reduction else direction] += content.nbytes


@contextmanager
def simulated(rank: int, num_ranks: int) -> Iterator[Transport]:
    """Be one rank of a world without other ranks. torch's own fake group knows the rank and the size."""
    transport = Transport()
    names = ("isend", "irecv", "all_gather_object", "barrier")
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=fake_pg.FakeStore())
    try:
        with patch.multiple(dist, **{name: getattr(transport, name) for name in names}):
            yield transport
    finally:
        dist.destroy_process_group()


@contextmanager
def timed_spots() -> Iterator[dict[str, float]]:
    """Add the processor seconds of each of `SPOTS` within the block."""
    seconds = dict.fromkeys(SPOTS, 0.0)

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            done = work(*args, **kwargs)
            seconds[name] += time.process_time() - start
            return done

        return call

    with ExitStack() as stack:
        for name, (owner, attribute) in SPOTS.items():
            stack.enter_context(patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        yield seconds


def measure(case: Case) -> list[dict[str, Any]]:
    """Return the cost of a step for rank 0 and for the busiest rank."""
    ranks = sorted({0, busiest(case)})
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        for rank in ranks:
            mp.start_processes(_work, (rank, case, Path(name)), nprocs=1, start_method="fork")
        return [json.loads(Path(name, f"{rank}.json").read_text()) for rank in ranks]


def busiest(case: Case) -> int:
    """Return the rank that draws and learns the most tokens."""
    lengths, groups = np.array(case.lengths), np.array(case.groups)
    costs = torch.from_numpy(lengths + len(samples_step.PROMPT))
    parts = partition(costs, torch.from_numpy(groups), case.num_processes).numpy()
    ranks = np.concatenate([case.replicas().numpy(), parts])
    return int(np.bincount(ranks, np.tile(lengths, 2)).argmax())


def _work(_: int, rank: int, case: Case, directory: Path) -> None:
    """Take steps as one rank of a simulated world, and write what they cost."""
    torch.set_num_threads(1)
    keep_freed_memory()
    with simulated(rank, case.num_processes) as transport:
        (directory / f"{rank}.json").write_text(json.dumps(found_on(rank, case, transport)))


def found_on(rank: int, case: Case, transport: Transport) -> dict[str, Any]:
    """Return what steps and an exchange cost this rank of a simulated world."""
    job = job_of(case, Shares.blocks(1))
    progress = first_step(job)
    transport.counts.clear()
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        take_step(job, progress, Timers(), step=STEP)
        seconds.append(time.process_time() - start)
    counts = {name: count // REPEATS for name, count in transport.counts.items()}
    with timed_spots() as spots:
        take_step(job, progress, Timers(), step=STEP)
    exchange = Exchange(rank, case.num_processes)
    exchanges = []
    for _ in range(REPEATS):
        start = time.process_time()
        exchange.run()
        exchanges.append(time.process_time() - start)
    index = job.samples.collect(Position(), Timers(), step=STEP).scored.index
    return {
        "num_ranks": case.num_processes,
        "rank": rank,
        "estimator": case.estimator,
        "seconds": min(seconds),
        "ns_per_token_of_share": min(seconds) / (case.num_samples // case.num_processes * case.num_tokens) * 1e9,
        "messages": 0,
        "index_bytes": index_bytes(index),
        "us_per_exchange": min(exchanges) * 1e6,
        "spots_us": {name: spent * 1e6 for name, spent in spots.items()},
    } | counts


def index_bytes(index: Index) -> int:
    """Return the bytes of the numbers that every rank knows of the samples."""
    values = [getattr(part, field.name) for part in (index, index.runs) for field in fields(part)]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
