"""The algorithm: sample, score, estimate, learn; again.

Everything here is the same on every rank. Which rank holds which shard of a model, and where a sample was generated, is
the business of those behind the protocols.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megarl.algorithms.config import AlgorithmSection
from megarl.algorithms.kl import AdaptiveKL, FixedKL
from megarl.algorithms.losses import PolicyOutputs
from megarl.batch import Experience, Prompts, Rollouts, Scored
from megarl.estimate import Metrics, estimate, mismatch_metrics
from megarl.tracking.timers import Timers
from megarl.tracking.tracker import Tracker
from megarl.validation import summarize


class PromptSource(Protocol):
    """Prompts as a pure function of the step."""

    def take(self, step: int) -> Prompts: ...
    def batches(self) -> Iterator[Prompts]: ...


class Sampler(Protocol):
    """The rollout engine, with the actor's weights."""

    def awake(self, timers: Timers) -> AbstractContextManager[None]: ...
    def generate(self, prompts: Prompts, *, step: int) -> Rollouts: ...
    def validate(self, prompts: Prompts, *, step: int) -> Rollouts: ...


class Scorer(Protocol):
    """The reward."""

    def score(self, rollouts: Rollouts) -> Scored: ...


class Policy(Protocol):
    """A model of the next token: the actor, or the reference, which is never updated."""

    def infer(self, batch: Rollouts) -> PolicyOutputs: ...
    def update(self, experience: Experience, *, step: int) -> Metrics: ...


class Critic(Protocol):
    """A model of the return."""

    def infer(self, batch: Rollouts) -> Tensor: ...
    def update(self, experience: Experience, *, step: int) -> Metrics: ...


class Checkpoints(Protocol):
    """What outlives the process."""

    def save(self, *, step: int, kl_coef: float) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When things happen, counted in finished steps; a frequency of 0 or less is never."""

    first_step: int
    last_step: int
    test_freq: int
    save_freq: int
    validate_first: bool
    critic_warmup: int

    def is_due(self, frequency: int, step: int) -> bool:
        """True every `frequency` steps, and at the end."""
        return frequency > 0 and (step % frequency == 0 or step == self.last_step)


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a run needs."""

    prompts: PromptSource
    val_prompts: PromptSource | None
    sampler: Sampler
    scorer: Scorer
    actor: Policy
    reference: Policy | None  # None: nothing asks for the KL
    critic: Critic | None  # None: the advantages come from groups
    algorithm: AlgorithmSection
    schedule: Schedule
    tracker: Tracker
    checkpoints: Checkpoints
    num_ranks: int
    log_val_generations: int  # answers shown at each validation


def train(job: Job, kl: FixedKL | AdaptiveKL) -> list[Mapping[str, float]]:
    """Run the steps of the schedule; returns the validation scores of the run, each with its `step`."""
    schedule, scores = job.schedule, []
    if job.val_prompts and schedule.validate_first:
        scores.append(validate(job, step=schedule.first_step))
        job.tracker.log(scores[-1], step=schedule.first_step)
    for step in range(schedule.first_step, schedule.last_step):
        timers = Timers()
        with timers("step"):
            metrics, kl = iterate(job, kl, timers, step=step)
            finished = step + 1
            if job.val_prompts and schedule.is_due(schedule.test_freq, finished):
                with timers("testing"):
                    scores.append(validate(job, step=finished))
                metrics |= scores[-1]
            if schedule.is_due(schedule.save_freq, finished):
                with timers("save_checkpoint"):
                    job.checkpoints.save(step=finished, kl_coef=kl.coef)
        seconds = timers.seconds()
        throughput = metrics["perf/total_num_tokens"] / seconds["timing_s/step"] / job.num_ranks
        job.tracker.log(metrics | seconds | {"perf/throughput": throughput}, step=finished)
    return scores


def iterate(job: Job, kl: FixedKL | AdaptiveKL, timers: Timers, *, step: int) -> tuple[Metrics, FixedKL | AdaptiveKL]:
    """One iteration of PPO or GRPO; returns its metrics and the KL controller of the next."""
    prompts = job.prompts.take(step)
    with timers("gen"), job.sampler.awake(timers):
        rollouts = job.sampler.generate(prompts, step=step)
    with timers("reward"):
        scored = job.scorer.score(rollouts)
    with timers("old_log_prob"):
        old = job.actor.infer(scored)
    with timers("ref"):
        reference = job.reference.infer(scored).log_probs if job.reference else None
    with timers("values"):
        values = job.critic.infer(scored) if job.critic else None

    with timers("adv"):
        experience, metrics = estimate(
            scored,
            old_log_probs=old.log_probs,
            ref_log_probs=reference,
            values=values,
            algorithm=job.algorithm,
            kl_coef=kl.coef if job.algorithm.use_kl_in_reward and job.reference else None,
        )
    if "actor/reward_kl_penalty" in metrics:
        kl = kl.update(metrics["actor/reward_kl_penalty"], num_steps=len(scored))

    if job.critic:
        with timers("update_critic"):
            metrics |= job.critic.update(experience, step=step)
    if step >= job.schedule.critic_warmup:
        with timers("update_actor"):
            metrics |= job.actor.update(experience, step=step)
    metrics |= {"actor/entropy": float(old.entropy[scored.mask].mean())}
    metrics |= {"perf/total_num_tokens": float(scored.lengths().sum())}
    return metrics | mismatch_metrics(old.log_probs, scored.rollout_log_probs, scored.mask), kl


def validate(job: Job, *, step: int) -> Metrics:
    """Score the actor on the validation prompts; logs some of its answers."""
    assert job.val_prompts is not None
    parts: list[Scored] = []
    with job.sampler.awake(Timers()):
        for prompts in job.val_prompts.batches():
            parts.append(job.scorer.score(job.sampler.validate(prompts, step=step)))
    metrics, rows = summarize(parts, num_shown=job.log_val_generations)
    job.tracker.log_table("val/generations", rows, step=step)
    return metrics
