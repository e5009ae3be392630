"""`python -m benchmarks samples`: what the samples of a step cost the processors of the ranks, outside of models.

Processes exchange over gloo, as in a run. Each has samples as an engine replica of one rank returns them, and takes the
loop's own step with them: a record, the exchange with the ranks that learn, the gate, the advantages, metrics and
mini-batches. Models answer at once. Processor time is counted, because the processes share the cores of this machine.
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.table import Table

from benchmarks import report
from benchmarks.options import samples_parser
from megarl.algorithms.config import AlgorithmSection
from megarl.algorithms.kl import FixedKL
from megarl.algorithms.losses import PolicyOutputs
from megarl.batch import (
    Elsewhere,
    Experience,
    Generation,
    Group,
    Prompt,
    Rewarded,
    Rollouts,
    Sample,
    Scored,
    float32,
    int32,
)
from megarl.data.order import Position
from megarl.distributed.exchange import join_world
from megarl.distributed.routing import route
from megarl.distributed.sharded import Sharded, Shares
from megarl.learner.packing import partition
from megarl.platform.screen import Screen
from megarl.rollout.config import SyncSection
from megarl.rollout.limits import Limits
from megarl.rollout.responses import of_groups
from megarl.rollout.window import Window, exchange
from megarl.samples.in_flight import NOTHING, InFlight
from megarl.tracking.protocol import NullTracker
from megarl.tracking.timers import Timers
from megarl.training.collect import Collected
from megarl.training.gate import Gate
from megarl.training.interfaces import Metrics
from megarl.training.loop import Job, Progress, take_step
from megarl.training.minibatches import MiniBatches
from megarl.training.steps import Schedule
from megarl.training.work import Work

PER_PROMPT = 8
STEP = 3
ROUNDING = 1e-8  # of the log-probabilities between engine and trainer
DRAWN_BYTES = 13  # of a token as an engine draws it: the token, its log-probability and version, and the mask
SHARE_BYTES = DRAWN_BYTES + 24  # and the outputs of models
REPEATS = 3
EXCHANGES = 100
FINISHED = 4
UNUSED: Any = None  # parts of a job that a single step does not touch


@dataclass(frozen=True)
class Case:
    """The samples of a step, and the processes that share them."""

    num_processes: int
    num_samples: int
    num_tokens: int  # of each response
    estimator: str


class Samples:
    """The source of a step: what each replica has drawn, with a score each."""

    def __init__(self, case: Case, shares: Shares) -> None:
        self._shares = shares
        self._generator = np.random.default_rng(shares.here)
        self._groups = [self._group(case, number) for number in range(case.num_samples // PER_PROMPT)]

    def collect(self, position: Position, timers: Timers, *, step: int, in_flight: InFlight = NOTHING) -> Collected:
        """Return the samples of the step."""
        drawn = of_groups(self._groups, self._shares)
        share = drawn.share
        scores = torch.arange(len(share), dtype=torch.float32) % 2
        scored = share.extend(Scored, texts=[""] * len(share), scores=scores, accuracies=scores)
        return Collected(scored=drawn.with_share(scored), baselines=None, position=position, metrics={})

    def _group(self, case: Case, number: int) -> Group:
        prompt = Prompt(index=number, token_ids=[1] * 64, text="", data_source="", ground_truth=None, extra_info={})
        samples = tuple(self._sample(case.num_tokens, number, sample) for sample in range(PER_PROMPT))
        return Group(prompt=prompt, samples=samples, started=STEP)

    def _sample(self, length: int, number: int, sample: int) -> Sample:
        replica = number % self._shares.number
        if replica != self._shares.here:
            return Elsewhere(
                number,
                sample,
                replica=replica,
                num_tokens=length,
                num_learnt=length,
                num_turns=0,
                has_log_probs=True,
                truncated=False,
                complete=True,
            )
        tokens, log_probs = int32(), float32()
        tokens.frombytes(self._generator.integers(0, 1000, length, dtype=np.int32).tobytes())
        log_probs.frombytes((-self._generator.random(length, dtype=np.float32)).tobytes())
        versions = int32([STEP]) * length
        return Generation(number, tokens, log_probs, truncated=False, weight_versions=versions, sample=sample)


class Actor:
    """An actor that answers at once. Each rank learns from samples that another has drawn."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._minibatches = MiniBatches(num_prompts=1 << 20, num_epochs=1, shuffle=True, seed=1)

    def take(self, samples: Sharded[Rewarded], *, step: int) -> Sharded[Rewarded]:
        """Bring the samples to the ranks that learn from them. A rank learns from no sample that it has drawn."""
        index = samples.index
        number = self._shares.number
        owners = torch.empty_like(index.owners)
        for share, chosen in enumerate(partition(index.lengths.tolist(), index.groups.tolist(), number)):
            owners[chosen] = share
        return route(samples, Rewarded, (owners + 1) % number, self._shares)

    def infer(self, batch: Sharded[Rollouts]) -> Any:
        """Return log-probabilities that differ from the engine's by rounding."""
        assert batch.share.rollout_log_probs is not None
        log_probs = batch.share.rollout_log_probs + ROUNDING
        return PolicyOutputs(log_probs=log_probs, entropy=torch.ones_like(log_probs))

    def forward_backward(self, experience: Sharded[Experience], *, step: int) -> Any:
        """Do nothing: the log-probabilities are computed before the update."""
        raise NotImplementedError

    def update(self, experience: Sharded[Experience], *, step: int, gradient: Any = None) -> Metrics:
        """Take the mini-batches of a step."""
        index = experience.index
        for chosen in self._minibatches.samples(index.groups, len(index.prompts), step=step):
            experience.select(chosen)
        return {}


class Critic(Actor):
    """A critic that answers at once."""

    def infer(self, batch: Sharded[Rollouts]) -> Any:
        """Return the values."""
        return torch.zeros(len(batch.share.responses))


def main(argv: Sequence[str]) -> int:
    """Measure, and print the results."""
    options = samples_parser().parse_args(argv)
    cases = [
        Case(number, options.samples // 2 * number, options.tokens, estimator)
        for estimator in ("grpo", "gae")
        for number in options.processes
    ]
    measured = [measure(case) for case in cases]
    found = {**report.origin("samples", argv), "cases": measured}
    if options.json:
        print(json.dumps(found))
    else:
        _show(found, Screen())
    return 0


def measure(case: Case) -> dict[str, Any]:
    """Return what a step costs the busiest process of a case."""
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        directory = Path(name)
        mp.spawn(_work, (case, directory), nprocs=case.num_processes)
        ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(case.num_processes)]
    num_tokens = case.num_samples * case.num_tokens
    share = num_tokens // case.num_processes
    seconds = max(rank["cpu_s"] for rank in ranks)
    return {
        "num_processes": case.num_processes,
        "num_samples": case.num_samples,
        "num_tokens": case.num_tokens,
        "estimator": case.estimator,
        "ns_per_token_busiest_rank": seconds / num_tokens * 1e9,
        "ns_per_token_of_share": seconds / share * 1e9,
        "peak_over_share": max(rank["peak_bytes"] for rank in ranks) / (share * SHARE_BYTES),
        "times_each_token_crosses": sum(rank["sent_bytes"] for rank in ranks) / (num_tokens * DRAWN_BYTES),
        "us_per_exchange": max(rank["exchange_cpu_s"] for rank in ranks) * 1e6,
    }


def _work(rank: int, case: Case, directory: Path) -> None:
    """Take steps as one rank, and write what they cost."""
    torch.set_num_threads(1)
    place = {"init_method": f"file://{directory}/rendezvous", "rank": rank, "world_size": case.num_processes}
    join_world(timeout=timedelta(seconds=300), **place)
    shares = Shares.blocks(1)
    job = _job(case, shares)
    progress = Progress(kl=FixedKL(0.0), position=Position())
    take_step(job, progress, Timers(), step=STEP)
    seconds = []
    with _counted() as sent, _peak() as peak:
        for _ in range(REPEATS):
            dist.barrier()
            start = time.process_time()
            take_step(job, progress, Timers(), step=STEP)
            seconds.append(time.process_time() - start)
    found = {
        "cpu_s": min(seconds),
        "sent_bytes": sent["bytes"] / REPEATS,
        "peak_bytes": peak["bytes"],
        "exchange_cpu_s": _exchange_seconds(rank, case.num_processes),
    }
    (directory / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _exchange_seconds(rank: int, num_processes: int) -> float:
    """Return the processor time of an exchange of windows, in which each replica has finished `FINISHED` samples."""
    finished = [Elsewhere(number, 0, rank, 100, 100, 0, True, False, True) for number in range(FINISHED)]
    start = time.process_time()
    for _ in range(EXCHANGES):
        exchange(lambda: Window(finished), range(num_processes))
    return (time.process_time() - start) / EXCHANGES


def _job(case: Case, shares: Shares) -> Job:
    return Job(
        samples=Samples(case, shares),
        actor=Actor(shares),
        reference=None,
        critic=Critic(shares) if case.estimator == "gae" else None,
        gate=Gate(limits=Limits.of(SyncSection(), "float32")),
        algorithm=AlgorithmSection(adv_estimator=case.estimator),
        critic_warmup=0,
        schedule=Schedule(first_step=0, last_step=1, test_freq=-1, save_freq=-1),
        validation=None,
        checkpoints=UNUSED,
        tracker=NullTracker(),
        num_ranks=case.num_processes,
        work=Work(),
    )


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count the bytes that this process sends point to point within the block."""
    found = Counter[str]()
    send = dist.isend

    def isend(tensor: torch.Tensor, *args: Any, **settings: Any) -> Any:
        found["bytes"] += tensor.nbytes
        return send(tensor, *args, **settings)

    with patch.object(dist, "isend", isend):
        yield found


@contextmanager
def _peak() -> Iterator[dict[str, int]]:
    """Measure how far the resident memory of this process rises within the block."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    found = dict[str, int]()
    yield found
    found["bytes"] = _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) << 10


def _show(found: dict[str, Any], console: Screen) -> None:
    table = Table(
        "processes",
        "samples",
        "estimator",
        "ns a token",
        "ns a token of the share",
        "peak / share",
        "crosses",
        "us an exchange",
    )
    for case in found["cases"]:
        table.add_row(
            str(case["num_processes"]),
            f"{case['num_samples']} x {case['num_tokens']}",
            case["estimator"],
            f"{case['ns_per_token_busiest_rank']:.0f}",
            f"{case['ns_per_token_of_share']:.0f}",
            f"{case['peak_over_share']:.1f}",
            f"{case['times_each_token_crosses']:.2f}",
            f"{case['us_per_exchange']:.0f}",
        )
    console.print(table)
    for title in ("machine", "versions", "command"):
        console.print(f"{title}: {found[title]}", highlight=False, soft_wrap=True)
