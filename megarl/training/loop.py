"""The algorithm: sample, score, estimate, learn; again.

Everything here is the same on every rank. Which rank holds which shard of a model, and where a sample was generated, is
the business of those behind the interfaces.
"""

from dataclasses import dataclass, replace
from statistics import fmean

from megarl.algorithms.config import AlgorithmSection
from megarl.algorithms.kl import AdaptiveKL, FixedKL
from megarl.checkpoint.state import Best, State
from megarl.data.order import Position
from megarl.distributed import watchdog
from megarl.distributed.signals import Stopped, stop_requested
from megarl.tracking.names import validation_of
from megarl.tracking.timers import Timers
from megarl.tracking.tracker import Tracker
from megarl.training.collect import SampleSource
from megarl.training.estimate import Metrics, estimate, mismatch_metrics
from megarl.training.gate import Gate, require_version
from megarl.training.interfaces import Checkpoints, Critic, Policy
from megarl.training.validation import Validation

KL = FixedKL | AdaptiveKL


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When things happen, counted in finished steps; a frequency of 0 or less is never."""

    first_step: int
    last_step: int
    test_freq: int
    save_freq: int
    validate_first: bool
    critic_warmup: int  # steps in which only the critic learns


def is_due(frequency: int, step: int, *, last_step: int) -> bool:
    """True every `frequency` finished steps, and at the end; a frequency of 0 or less is never."""
    return frequency > 0 and (step % frequency == 0 or step == last_step)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What one iteration hands to the next, beside the models."""

    kl: KL  # the controller of the KL penalty in the reward
    position: Position  # of the next prompt in the data
    best: Best | None = None  # None: nothing was validated yet
    mismatches: tuple[float, ...] = ()  # between engine and trainer in the run's first iterations

    def state(self, step: int, metrics: Metrics) -> State:
        """What a checkpoint of `step` finished steps keeps."""
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
    """All that a run needs."""

    samples: SampleSource
    actor: Policy
    reference: Policy | None  # None: nothing asks for its log-probabilities
    critic: Critic | None  # None: the advantages come from groups
    gate: Gate | None  # None: the samples need not be those of the weights that learn, as in a replay
    algorithm: AlgorithmSection
    schedule: Schedule
    validation: Validation | None
    checkpoints: Checkpoints
    tracker: Tracker
    num_ranks: int


def train(job: Job, progress: Progress) -> None:
    """Run the steps of the schedule, from where the run stands.

    Raises:
        Stopped: the job was told to end; the last finished step is saved, whatever `save_freq` says.
    """
    schedule = job.schedule
    if job.validation and schedule.validate_first:
        scores, progress = validate(job.validation, progress, step=schedule.first_step)
        job.tracker.log(scores, step=schedule.first_step)
    for step in range(schedule.first_step, schedule.last_step):
        watchdog.note(step=step, phase="step")
        timers = Timers()
        with timers("step"):
            metrics, progress = iterate(job, progress, timers, step=step)
            finished = step + 1
            if job.validation and is_due(schedule.test_freq, finished, last_step=schedule.last_step):
                with timers("testing"):
                    scores, progress = validate(job.validation, progress, step=finished)
                metrics |= scores
            stops = stop_requested() and finished < schedule.last_step
            if stops or is_due(schedule.save_freq, finished, last_step=schedule.last_step):
                with timers("save_checkpoint"):
                    job.checkpoints.save(progress.state(finished, metrics))
            metrics |= job.checkpoints.advance()
        seconds = timers.seconds()
        throughput = metrics["perf/total_num_tokens"] / seconds["timing_s/step"] / job.num_ranks
        job.tracker.log(metrics | seconds | {"perf/throughput": throughput}, step=finished)
        if stops:
            job.checkpoints.close()
            raise Stopped(finished)
    job.checkpoints.close()


def validate(validation: Validation, progress: Progress, *, step: int) -> tuple[Metrics, Progress]:
    """Judge the actor; returns the scores, with the best so far, and that remembered."""
    metrics = validation.run(step=step)
    best = Best(fmean(validation_of(metrics).values()), step).or_better(progress.best)
    return metrics | {"val/best_score": best.score, "val/best_step": float(best.step)}, replace(progress, best=best)


def iterate(job: Job, progress: Progress, timers: Timers, *, step: int) -> tuple[Metrics, Progress]:
    """One iteration; returns its metrics and what the next one starts from."""
    collected, kl = job.samples.collect(progress.position, timers, step=step), progress.kl
    scored, baselines = collected.judged()
    require_version(scored, step=step)
    with timers("old_log_prob"):
        old = job.actor.infer(scored)
    mismatch, mismatches = mismatch_metrics(old.log_probs, scored.rollout_log_probs, scored.mask), progress.mismatches
    if job.gate and scored.rollout_log_probs is not None:
        verdict = job.gate.judge(scored, old.log_probs, mismatches, step=step)
        scored, old = scored.select(verdict.rows), old.select(verdict.rows)
        baselines = None if baselines is None else baselines[verdict.rows]
        mismatch, mismatches = mismatch | verdict.metrics, verdict.healthy
    with timers("ref"):
        ref_log_probs = job.reference.infer(scored).log_probs if job.reference else None
    with timers("values"):
        values = job.critic.infer(scored) if job.critic else None

    with timers("adv"):
        experience, metrics = estimate(
            scored,
            old_log_probs=old.log_probs,
            ref_log_probs=ref_log_probs,
            values=values,
            baselines=baselines,
            algorithm=job.algorithm,
            kl_coef=kl.coef if job.algorithm.use_kl_in_reward else None,
            exact_kl=old.kl,
        )
        if "actor/reward_kl_penalty" in metrics:
            kl = kl.update(metrics["actor/reward_kl_penalty"], num_steps=len(scored))

    if job.critic:
        with timers("update_critic"):
            metrics |= job.critic.update(experience, step=step)
    if step >= job.schedule.critic_warmup:
        with timers("update_actor"):
            metrics |= job.actor.update(experience, step=step)

    metrics["actor/entropy"] = float(old.entropy[scored.mask].mean())
    metrics["perf/total_num_tokens"] = float(collected.scored.lengths().sum())
    metrics["reward/masked_rate"] = 1.0 - float(collected.scored.judged().double().mean())
    going_on = replace(progress, kl=kl, position=collected.position, mismatches=mismatches)
    return metrics | mismatch | collected.metrics, going_on
