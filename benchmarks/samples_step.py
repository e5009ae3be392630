"""The loop's own step over samples that an engine has drawn, with models that answer at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import MODELS
from megarl.algorithms.config import AlgorithmSection
from megarl.algorithms.kl import FixedKL
from megarl.algorithms.losses import PolicyOutputs
from megarl.batch import (
    Experience,
    Generation,
    Prompt,
    PromptList,
    Rewarded,
    Rollouts,
    Scored,
    float32,
    int32,
)
from megarl.data.order import Position
from megarl.distributed.redistribution import redistribute
from megarl.distributed.sharded import Sharded, Shares
from megarl.learner.packing import partition
from megarl.learner.per_data_source import PerDataSource
from megarl.models.architecture import read_architecture
from megarl.rollout.config import SyncSection
from megarl.rollout.limits import Limits
from megarl.rollout.open_groups import OpenGroups
from megarl.rollout.patches import DrawnTokens
from megarl.rollout.responses import of_groups
from megarl.rollout.sampling import read_output
from megarl.rollout.table import GroupRows
from megarl.rollout.window import Window, exchange
from megarl.samples.in_flight import NOTHING, InFlight
from megarl.tracking.protocol import NullTracker
from megarl.tracking.timers import Timers
from megarl.training.collect import Collected
from megarl.training.flops import FlopsCounter
from megarl.training.gate import Gate
from megarl.training.interfaces import Metrics
from megarl.training.loop import Job, Progress, take_step
from megarl.training.minibatches import MiniBatches
from megarl.training.steps import Schedule

if TYPE_CHECKING:
    from vllm import RequestOutput

PER_PROMPT = 8
PROMPT = [1] * 64
STEP = 0x01010101  # equal bytes: a rank that is simulated receives nothing else
ROUNDING = 1e-8  # of the log-probabilities between engine and trainer
FINISHED = 4  # samples of a replica between two exchanges
ONE = int32([1])  # token
SIZES = PerDataSource(other=read_architecture(MODELS["llama-1m"]))
PHASES = ("old_log_prob", "update_actor", "values", "update_critic")
FLOPS = FlopsCounter(passes={phase: [(SIZES, 1)] for phase in PHASES})
UNUSED: Any = None  # parts of a job that a single step does not touch


@dataclass(frozen=True)
class Case:
    """The samples of a step, and the processes that share them."""

    num_processes: int
    num_samples: int
    num_tokens: int  # of each response
    estimator: str
    ragged: bool = False  # responses have 1 to twice as many tokens, and those of each replica the same lengths

    @cached_property
    def lengths(self) -> Sequence[int]:
        """The tokens of each response."""
        if not self.ragged:
            return [self.num_tokens] * self.num_samples
        generator = np.random.default_rng(0)
        of_replica = generator.integers(1, 2 * self.num_tokens, self.num_samples // self.num_processes)
        of_replicas = generator.permuted(np.tile(of_replica, (self.num_processes, 1)), axis=1)
        found = np.empty(self.num_samples, dtype=np.int64)
        found[self.replicas().argsort(stable=True).numpy()] = of_replicas.flatten()
        return found.tolist()

    @property
    def groups(self) -> Sequence[int]:
        """The prompt of each response."""
        return [number // PER_PROMPT for number in range(self.num_samples)]

    def replicas(self) -> Tensor:
        """Return the replica that draws each response: `[B]` int64. Each draws every prompt whose turn it is.

        Prompts of equal cost are dealt to learners from the first on, so none learns from a sample that it has drawn.
        """
        return (torch.tensor(self.groups) + 1) % self.num_processes


class Samples:
    """The source of a step: what each replica of vLLM has returned, with a score each."""

    def __init__(self, case: Case, shares: Shares) -> None:
        self._shares = shares
        self._groups = open_groups(case, shares)
        self._outputs = engine_outputs(case, shares)

    def collect(self, position: Position, timers: Timers, *, step: int, in_flight: InFlight = NOTHING) -> Collected:
        """Return the samples of the step."""
        drawn = of_groups(finished(self._groups, self._outputs), self._shares)
        share = drawn.share
        scores = torch.arange(len(share), dtype=torch.float32) % 2
        scored = share.extend(Scored, texts=[""] * len(share), scores=scores, accuracies=scores)
        return Collected(scored=drawn.with_share(scored), baselines=None, position=position, metrics={})


def drawn_groups(case: Case, shares: Shares) -> GroupRows:
    """Return the groups of a step, complete, as a session of this rank leaves them."""
    return finished(open_groups(case, shares), engine_outputs(case, shares))


def open_groups(case: Case, shares: Shares) -> GroupRows:
    """Return the groups of a step, complete except for the samples of this rank."""
    number = case.num_samples // PER_PROMPT
    prompts = PromptList(
        Prompt(index=place, token_ids=PROMPT, text="", data_source="", ground_truth=None, extra_info={})
        for place in range(number)
    )
    groups = GroupRows.new(prompts, range(PER_PROMPT), started=STEP)
    table = groups.table
    places, lengths = torch.tensor(case.groups), torch.tensor(case.lengths)
    replicas = case.replicas()
    known = {"prompt": places, "num_tokens": lengths, "num_learnt": lengths, "complete": torch.ones_like(places)}
    for name, column in known.items():
        table.column(name).copy_(column)
    table.column("replica").copy_(replicas.where(replicas != shares.here, Generation.replica))
    return groups


def engine_outputs(case: Case, shares: Shares) -> dict[int, "RequestOutput"]:
    """Return what vLLM returns of the samples of this rank, by their places: tokens in lists and `DrawnTokens`."""
    from vllm.outputs import CompletionOutput, RequestOutput

    generator = np.random.default_rng(shares.here)
    found = {}
    for place in np.flatnonzero(case.replicas().numpy() == shares.here).tolist():
        length = case.lengths[place]
        token_ids = generator.integers(0, 1 << 16, length).tolist()
        log_probs: Any = DrawnTokens()
        log_probs.token_ids.extend(token_ids)
        log_probs.logprobs.extend(-generator.random(length, dtype=np.float32))
        completion = CompletionOutput(0, "", token_ids, 0.0, log_probs, finish_reason="stop")
        found[place] = RequestOutput(str(place), None, PROMPT, None, [completion], finished=True)
    return found


def finished(groups: GroupRows, outputs: Mapping[int, "RequestOutput"]) -> GroupRows:
    """Return the groups with the samples in the outputs of this rank's engine, read as a replica reads them."""
    own = {}
    for place, output in outputs.items():
        prompt, sample = divmod(place, PER_PROMPT)
        begun = Generation(prompt, int32(), float32(), False, sample=sample, complete=False)
        own[place] = begun.then(read_output(output, given=PROMPT, where="of a case", weight_version=STEP))
    return replace(groups, table=replace(groups.table, own=own))


class Actor:
    """An actor that answers at once."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._minibatches = MiniBatches(num_prompts=1 << 20, num_epochs=1, shuffle=True, seed=1)

    def take(self, samples: Sharded[Rewarded], *, step: int) -> Sharded[Rewarded]:
        """Bring the samples to the ranks that learn from them."""
        index = samples.index
        owners = partition(index.run_lengths, index.runs.groups, self._shares.number)
        return redistribute(samples, Rewarded, index.runs.owned_by(owners), self._shares)

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
        for _ in self._minibatches.of(experience, step=step):
            pass
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
        flops=FLOPS,
    )


def first_step(job: Job) -> Progress:
    """Take a step that nothing measures, and return what the next steps start from."""
    progress = Progress(kl=FixedKL(0.0), position=Position())
    take_step(job, progress, Timers(), step=STEP)
    return progress


class Exchange:
    """An exchange of windows, in which each replica has finished `FINISHED` samples, which find their groups."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        """Open the groups of the samples of all replicas, a sample each."""
        number = FINISHED * num_replicas
        prompt = Prompt(index=0, token_ids=PROMPT, text="", data_source="", ground_truth=None, extra_info={})
        self._groups = OpenGroups()
        self._groups.add(np.arange(number), GroupRows.new([prompt] * number, range(1), started=0))
        first = FINISHED * rank
        self._finished = [Generation(place, ONE, None, False, sample=0) for place in range(first, first + FINISHED)]
        self._ranks = range(num_replicas)

    def run(self) -> None:
        """Exchange once."""
        self._groups.note(exchange(lambda: Window(self._finished), self._ranks))
        self._groups.take_complete()
