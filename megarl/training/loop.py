"""The algorithm of reinforcement learning: sample, score, estimate, learn; repeat.

This code is the same on every rank. The implementations of the interfaces know which rank holds which shard of a model
and which engine generated a sample.
"""

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeVar

from torch import Tensor

from megarl.algorithms.config import AlgorithmSection
from megarl.algorithms.kl import AdaptiveKL, FixedKL
from megarl.algorithms.losses import PolicyOutputs
from megarl.batch import Experience, Rewarded
from megarl.checkpoint.state import Best, State
from megarl.data.order import Position
from megarl.distributed.sharded import Sharded
from megarl.distributed.signals import Stopped
from megarl.samples.in_flight import NOTHING, InFlight
from megarl.tracking.names import STEP_SECONDS, validation_of
from megarl.tracking.protocol import Tracker
from megarl.tracking.timers import Timers
from megarl.training.collect import SampleSource
from megarl.training.custom import CustomEstimator
from megarl.training.estimate import estimate, mismatch_metrics
from megarl.training.flops import FlopsCounter
from megarl.training.gate import Gate, require_version
from megarl.training.interfaces import Checkpoints, Critic, Metrics, Policy, Reference
from megarl.training.statistics import mean
from megarl.training.steps import Schedule, begin_step, end_step
from megarl.training.validation import Validation

KL = FixedKL | AdaptiveKL
T = TypeVar("T", PolicyOutputs, "RefAndValues")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state that one step hands to the next, except the models."""

    kl: KL  # the controller of the KL penalty in the reward
    position: Position  # of the next prompt in the data
    best: Best | None = None  # None: no validation yet
    mismatches: tuple[float, ...] = ()  # between engine and trainer in the run's first steps
    in_flight: InFlight = NOTHING  # groups that continue in the next step

    def state(self, step: int, metrics: Metrics) -> State:
        """Return the state that a checkpoint after `step` finished steps keeps."""
        return State(
            step=step,
            kl_coef=self.kl.coef,
            position=self.position,
            best=self.best,
            metrics=metrics,
            mismatches=self.mismatches,
            files=self.in_flight.files(),
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """The parts of a run."""

    samples: SampleSource
    actor: Policy[Any]
    reference: Reference | None  # None: its log-probabilities are not needed
    critic: Critic | None  # None: the advantages come from groups
    gate: Gate | None  # None: the samples may come from other weights, as in a replay
    algorithm: AlgorithmSection
    custom_estimator: CustomEstimator | None = None  # the user's; None: the advantages come from a built-in estimator
    critic_warmup: int  # steps in which only the critic learns
    schedule: Schedule
    validation: Validation | None
    checkpoints: Checkpoints
    tracker: Tracker
    num_ranks: int
    flops: FlopsCounter
    max_staleness: int = 0  # steps that may finish between the weights of a token and the step that learns from it
    fused_old_log_probs: bool = False  # the forward pass of the actor's one update computes the old log-probabilities


@dataclass(frozen=True, kw_only=True)
class CheckedSamples:
    """The samples of a step that agree with the engine's probabilities, and the actor's outputs on them."""

    rows: Tensor | None  # [K] int64: the places of the kept samples among all; None: all are kept
    kept: Sharded[Rewarded]
    outputs: PolicyOutputs  # on the kept samples
    mismatches: tuple[float, ...]  # for the next step's gate
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class RefAndValues:
    """The outputs on the samples of a step from the models that are not the actor."""

    ref_log_probs: Tensor | None  # [n] float32; None: there is no reference
    values: Tensor | None  # [n] float32; None: there is no critic


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The experience that a step learns from."""

    experience: Sharded[Experience]
    kl: KL  # for the next step
    metrics: Metrics


def train(job: Job, progress: Progress) -> None:
    """Run the steps of the schedule, starting from `progress`.

    Raises:
        Stopped: the job received a signal to end. The last finished step is saved, whatever the schedule says.
    """
    schedule = job.schedule
    validation = job.validation
    if validation and schedule.validate_first:
        scores, progress = validate_actor(validation, progress, step=schedule.first_step)
        job.tracker.log(scores, step=schedule.first_step)
    for number in schedule.numbers:
        timers = begin_step(number)
        finished = number + 1
        with schedule.traced(finished):
            metrics, progress = take_step(job, progress, timers, step=number)
        if validation and schedule.validates(finished):
            with timers("testing"):
                scores, progress = validate_actor(validation, progress, step=finished)
            metrics |= scores
        is_stopping = schedule.stops(finished)
        is_best = progress.best is not None and progress.best.step == finished
        if is_stopping or schedule.saves(finished, is_best=is_best):
            with timers("save_checkpoint"):
                job.checkpoints.save(progress.state(finished, metrics))
        metrics = metrics | end_step(timers, job.checkpoints)
        job.tracker.log(metrics | throughput(job, metrics), step=finished)
        if is_stopping:
            job.checkpoints.close()
            raise Stopped(finished)
    job.checkpoints.close()


def throughput(job: Job, metrics: Metrics) -> Metrics:
    """Return the tokens a second and rank of a step, and how far it uses the devices, from its other metrics."""
    seconds = metrics[STEP_SECONDS]
    per_rank = metrics["perf/total_num_tokens"] / seconds / job.num_ranks
    return {"perf/throughput": per_rank} | job.flops.utilization(metrics["perf/tflop"], seconds)


def validate_actor(validation: Validation, progress: Progress, *, step: int) -> tuple[Metrics, Progress]:
    """Validate the actor. Return the scores, the best so far among them, and the progress that remembers the best."""
    metrics = validation.run(step=step)
    best = Best(fmean(validation_of(metrics).values()), step).or_better(progress.best)
    return metrics | {"val/best_score": best.score, "val/best_step": float(best.step)}, replace(progress, best=best)


def take_step(job: Job, progress: Progress, timers: Timers, *, step: int) -> tuple[Metrics, Progress]:
    """Sample, score, estimate and learn once. Return the metrics and the progress that the next step starts from.

    If `fused_old_log_probs`, the actor's log-probabilities on the samples come from the forward pass of its update, and
    the advantages are computed first. If samples are then refused, the update begins again without them.
    """
    collected = job.samples.collect(progress.position, timers, step=step, in_flight=progress.in_flight)
    with_score = collected.scored_only()
    scored = require_version(with_score.scored, step=step, max_staleness=job.max_staleness)
    samples = job.actor.take(scored, step=step)
    baselines = with_score.baselines
    learns = step >= job.critic_warmup
    gradient = None
    metrics = Metrics()
    if learns and job.fused_old_log_probs:
        others = infer_ref_and_values(job, samples, timers)
        batch = compute_advantages(job, samples, baselines, None, others, progress.kl, timers)
        with timers("update_actor"):
            gradient = job.actor.forward_backward(batch.experience, step=step)
        checked = check_against_engine(job, samples, gradient.outputs, progress.mismatches, step=step)
        if checked.rows is not None:
            gradient.discard()
            gradient = None
            others = on_rows(others, samples, checked.rows)
    else:
        with timers("old_log_prob"):
            outputs, samples = job.actor.infer_first(samples)
        checked = check_against_engine(job, samples, outputs, progress.mismatches, step=step)
        others = infer_ref_and_values(job, checked.kept, timers)
    if gradient is None:
        if baselines is not None and checked.rows is not None:
            baselines = baselines[checked.rows]
        batch = compute_advantages(job, checked.kept, baselines, checked.outputs, others, progress.kl, timers)
    if learns:
        with timers("update_actor"):
            metrics |= job.actor.update(batch.experience, step=step, gradient=gradient)
    if job.critic:
        with timers("update_critic"):
            metrics |= job.critic.update(batch.experience, step=step)

    assert checked.outputs.entropy is not None, "an actor without entropies"
    metrics["actor/entropy"] = mean(checked.kept, checked.outputs.entropy)
    metrics["perf/total_num_tokens"] = float(collected.scored.index.run_lengths.sum())
    metrics |= job.flops.metrics(collected.scored, timers.seconds())
    metrics["reward/masked_rate"] = 1.0 - len(scored) / len(collected.scored)
    progress = replace(
        progress,
        kl=batch.kl,
        position=collected.position,
        mismatches=checked.mismatches,
        in_flight=collected.in_flight,
    )
    return batch.metrics | metrics | checked.metrics | collected.metrics, progress


def check_against_engine(
    job: Job, samples: Sharded[Rewarded], outputs: PolicyOutputs, mismatches: tuple[float, ...], *, step: int
) -> CheckedSamples:
    """Compare the actor's outputs on the samples with the engine's probabilities. Raises what `Gate.check` does."""
    metrics = mismatch_metrics(samples, outputs.log_probs)
    rows = None
    if job.gate and samples.share.rollout_log_probs is not None:
        passed = job.gate.check(samples, outputs.log_probs, mismatches, step=step)
        rows = passed.rows
        if rows is not None:
            outputs = on_rows(outputs, samples, rows)
            samples = samples.select(rows)
        metrics = metrics | passed.metrics
        mismatches = passed.healthy
    return CheckedSamples(rows=rows, kept=samples, outputs=outputs, mismatches=mismatches, metrics=metrics)


def on_rows(outputs: T, samples: Sharded[Rewarded], rows: Tensor) -> T:
    """Return a model's outputs on the samples at `rows`, int64 `[k]`, given those on all `samples`."""
    columns = {name: column for name, column in vars(outputs).items() if column is not None}
    return replace(outputs, **{name: samples.tokens_of(rows, column) for name, column in columns.items()})


def infer_ref_and_values(job: Job, samples: Sharded[Rewarded], timers: Timers) -> RefAndValues:
    """Run the samples through the reference and the critic, if the job has them."""
    with timers("ref"):
        ref_log_probs = job.reference.infer(samples).log_probs if job.reference else None
    with timers("values"):
        values = job.critic.infer(samples) if job.critic else None
    return RefAndValues(ref_log_probs=ref_log_probs, values=values)


def compute_advantages(
    job: Job,
    samples: Sharded[Rewarded],
    baselines: Tensor | None,
    old: PolicyOutputs | None,
    others: RefAndValues,
    kl: KL,
    timers: Timers,
) -> StepBatch:
    """Estimate the advantages of the samples. `old` are the actor's outputs on them; None: the update computes them."""
    with timers("adv"):
        experience, metrics = estimate(
            samples,
            old_log_probs=old.log_probs if old else None,
            ref_log_probs=others.ref_log_probs,
            values=others.values,
            baselines=baselines,
            algorithm=job.algorithm,
            kl_coef=kl.coef if job.algorithm.use_kl_in_reward else None,
            exact_kl=old.kl if old else None,
            custom=job.custom_estimator,
        )
        if "actor/reward_kl_penalty" in metrics:
            kl = kl.update(metrics["actor/reward_kl_penalty"], num_steps=len(samples))
    return StepBatch(experience=experience, kl=kl, metrics=metrics)
