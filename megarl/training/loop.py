"""The algorithm of reinforcement learning: sample, score, estimate, learn; repeat.

This code is the same on every rank. The implementations of the interfaces know which rank holds which shard of a model
and which engine generated a sample.
"""

from dataclasses import dataclass, replace
from statistics import fmean

from megarl.algorithms.config import AlgorithmSection
from megarl.algorithms.kl import AdaptiveKL, FixedKL
from megarl.checkpoint.state import Best, State
from megarl.data.order import Position
from megarl.tracking.names import STEP_SECONDS, validation_of
from megarl.tracking.timers import Timers
from megarl.tracking.tracker import Tracker
from megarl.training.collect import SampleSource
from megarl.training.estimate import estimate, mismatch_metrics
from megarl.training.gate import Gate, require_version
from megarl.training.interfaces import Checkpoints, Critic, Metrics, Policy
from megarl.training.steps import Schedule, run_steps
from megarl.training.validation import Validation

KL = FixedKL | AdaptiveKL


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state that one step hands to the next, except the models."""

    kl: KL  # the controller of the KL penalty in the reward
    position: Position  # of the next prompt in the data
    best: Best | None = None  # None: no validation yet
    mismatches: tuple[float, ...] = ()  # between engine and trainer in the run's first steps

    def state(self, step: int, metrics: Metrics) -> State:
        """Return the state that a checkpoint after `step` finished steps keeps."""
        return State(
            step=step,
            kl_coef=self.kl.coef,
            position=self.position,
            best=self.best,
            metrics=metrics,
            mismatches=self.mismatches,
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """The parts of a run."""

    samples: SampleSource
    actor: Policy
    reference: Policy | None  # None: its log-probabilities are not needed
    critic: Critic | None  # None: the advantages come from groups
    gate: Gate | None  # None: the samples may come from other weights, as in a replay
    algorithm: AlgorithmSection
    critic_warmup: int  # steps in which only the critic learns
    schedule: Schedule
    validation: Validation | None
    checkpoints: Checkpoints
    tracker: Tracker
    num_ranks: int


def train(job: Job, progress: Progress) -> None:
    """Run the steps of the schedule, starting from `progress`. Raises what `run_steps` does."""

    def step(number: int, timers: Timers) -> Metrics:
        nonlocal progress
        metrics, progress = take_step(job, progress, timers, step=number)
        return metrics

    def validate(finished: int) -> Metrics:
        nonlocal progress
        assert job.validation, "there is nothing to validate on"
        scores, progress = score_actor(job.validation, progress, step=finished)
        return scores

    def validate_in_step(finished: int, timers: Timers) -> Metrics:
        with timers("testing"):
            return validate(finished)

    def throughput(metrics: Metrics, seconds: float) -> Metrics:
        per_rank = metrics["perf/total_num_tokens"] / seconds / job.num_ranks
        return {STEP_SECONDS: seconds, "perf/throughput": per_rank}

    schedule = job.schedule
    if job.validation and schedule.validate_first:
        job.tracker.log(validate(schedule.first_step), step=schedule.first_step)
    run_steps(
        schedule,
        step=step,
        validate=validate_in_step if job.validation else None,
        state=lambda finished, metrics: progress.state(finished, metrics),
        tracker=job.tracker,
        checkpoints=job.checkpoints,
        summarize=throughput,
    )


def score_actor(validation: Validation, progress: Progress, *, step: int) -> tuple[Metrics, Progress]:
    """Validate the actor. Return the scores, the best so far among them, and the progress that remembers the best."""
    metrics = validation.run(step=step)
    best = Best(fmean(validation_of(metrics).values()), step).or_better(progress.best)
    return metrics | {"val/best_score": best.score, "val/best_step": float(best.step)}, replace(progress, best=best)


def take_step(job: Job, progress: Progress, timers: Timers, *, step: int) -> tuple[Metrics, Progress]:
    """Sample, score, estimate and learn once. Return the metrics and the progress that the next step starts from."""
    collected, kl = job.samples.collect(progress.position, timers, step=step), progress.kl
    kept = collected.judged()
    require_version(kept.scored, step=step)
    with timers("old_log_prob"):
        old = job.actor.infer(kept.scored)
    engine_log_probs, mismatches = kept.scored.rollout_log_probs, progress.mismatches
    mismatch = mismatch_metrics(old.log_probs, engine_log_probs, kept.scored.mask)
    if job.gate and engine_log_probs is not None:
        verdict = job.gate.judge(kept.scored, old.log_probs, mismatches, step=step)
        kept, old = kept.select(verdict.rows), old.select(verdict.rows)
        mismatch, mismatches = mismatch | verdict.metrics, verdict.healthy
    with timers("ref"):
        ref_log_probs = job.reference.infer(kept.scored).log_probs if job.reference else None
    with timers("values"):
        values = job.critic.infer(kept.scored) if job.critic else None

    with timers("adv"):
        experience, metrics = estimate(
            kept.scored,
            old_log_probs=old.log_probs,
            ref_log_probs=ref_log_probs,
            values=values,
            baselines=kept.baselines,
            algorithm=job.algorithm,
            kl_coef=kl.coef if job.algorithm.use_kl_in_reward else None,
            exact_kl=old.kl,
        )
        if "actor/reward_kl_penalty" in metrics:
            kl = kl.update(metrics["actor/reward_kl_penalty"], num_steps=len(kept.scored))

    if job.critic:
        with timers("update_critic"):
            metrics |= job.critic.update(experience, step=step)
    if step >= job.critic_warmup:
        with timers("update_actor"):
            metrics |= job.actor.update(experience, step=step)

    metrics["actor/entropy"] = float(old.entropy[kept.scored.mask].mean())
    metrics["perf/total_num_tokens"] = float(collected.scored.lengths().sum())
    metrics["reward/masked_rate"] = 1.0 - float(collected.scored.judged().double().mean())
    progress = replace(progress, kl=kl, position=collected.position, mismatches=mismatches)
    return metrics | mismatch | collected.metrics, progress
