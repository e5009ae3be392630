"""The loop's own step over samples that an engine has drawn, with models that answer at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

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
from megarl.distributed.routing import route
from megarl.distributed.sharded import Sharded, Shares
from megarl.learner.packing import partition
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
PROMPT = [1] * 64
STEP = 0x01010101  # equal bytes: a rank that is simulated receives nothing else
ROUNDING = 1e-8  # of the log-probabilities between engine and trainer
FINISHED = 4  # samples of a replica between two exchanges
UNUSED: Any = None  # parts of a job that a single step does not touch


@dataclass(frozen=True)
class Case:
    """The samples of a step, and the processes that share them."""

    num_processes: int
    num_samples: int
    num_tokens: int  # of each response
    estimator: str
    ragged: bool = False  # responses have 1 to twice as many tokens

    @cached_property
    def lengths(self) -> Sequence[int]:
        """The tokens of each response."""
        if not self.ragged:
            return [self.num_tokens] * self.num_samples
        found: list[int] = np.random.default_rng(0).integers(1, 2 * self.num_tokens, self.num_samples).tolist()
        return found

    @property
    def groups(self) -> Sequence[int]:
        """The prompt of each response. A replica draws every prompt whose number is its own modulo the replicas."""
        return [number // PER_PROMPT for number in range(self.num_samples)]


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
        prompt = Prompt(index=number, token_ids=PROMPT, text="", data_source="", ground_truth=None, extra_info={})
        lengths = case.lengths[number * PER_PROMPT : (number + 1) * PER_PROMPT]
        samples = tuple(self._sample(length, number, sample) for sample, length in enumerate(lengths))
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
        owners = partition(index.lengths, index.groups, number)
        return route(samples, Rewarded, (owners + 1) % number, self._shares)

    def infer(self, batch: Sharded[Rollouts]) -> Any:
        """Return log-probabilities that differ from the engine's by rounding."""
        assert batch.share.rollout_log_probs is not None
        log_probs = batch.share.rollout_log_probs + ROUNDING
        return PolicyOutputs(log_probs=log_probs, entropy=torch.ones_like(log_probs))

    def infer_first(self, samples: Sharded[Rewarded]) -> tuple[Any, Sharded[Rewarded]]:
        """Return the same, and the samples as they are."""
        return self.infer(samples), samples

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


def job_of(case: Case, shares: Shares) -> Job:
    """Return the parts of a run that a step touches."""
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


def first_step(job: Job) -> Progress:
    """Take a step that nothing measures, and return what the next steps start from."""
    progress = Progress(kl=FixedKL(0.0), position=Position())
    take_step(job, progress, Timers(), step=STEP)
    return progress


def exchange_windows(rank: int, num_replicas: int) -> None:
    """Exchange windows, in which each replica has finished `FINISHED` samples."""
    finished = [Elsewhere(number, 0, rank, 100, 100, 0, True, False, True) for number in range(FINISHED)]
    exchange(lambda: Window(finished), range(num_replicas))
