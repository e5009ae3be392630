"""Learning from files without an engine: the loop of supervised fine-tuning and of training a reward model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from megarl.platform import progress
from megarl.algorithms.losses import Totals
from megarl.batch import Rollouts
from megarl.checkpoint.state import State
from megarl.data.pairs import PairStream
from megarl.data.preferences import PreferenceStream
from megarl.data.stream import FileStream
from megarl.distributed import watchdog
from megarl.distributed.signals import Stopped
from megarl.learner.batching import Budget
from megarl.learner.learner import Learner
from megarl.learner.terms import LossTerm, Objective
from megarl.tracking.protocol import Tracker
from megarl.training.interfaces import Checkpoints, Metrics
from megarl.training.objectives import PreferenceObjective
from megarl.training.skips import Skips
from megarl.training.steps import Schedule, begin_step, end_step
from megarl.training.updates import update


@dataclass(frozen=True, kw_only=True)
class SupervisedTask:
    """The data and the objective of a model that learns from files."""

    role: Literal["policy", "value"]
    name: str  # of the model in checkpoints
    batches: FileStream[Rollouts]
    objective: Objective
    budget: Budget
    validate: Callable[[Learner], Metrics] | None  # None: nothing to validate on


def train(
    learner: Learner,
    task: SupervisedTask,
    schedule: Schedule,
    *,
    skips: Skips,
    tracker: Tracker,
    checkpoints: Checkpoints,
) -> None:
    """Run the steps of the schedule. Raises what `loop.train` does."""
    for number in schedule.numbers:
        timers = begin_step(number)
        finished = number + 1
        with schedule.traced(finished), progress.within("step"):
            batch = learner.spread(task.batches.take(number), num_together=task.budget.num_together)
            term = LossTerm(batch=batch, objective=task.objective)
            metrics = update(learner, [[term]], task.budget, skips=skips, step=number)
        if task.validate and schedule.validates(finished):
            with timers("testing"):
                metrics |= task.validate(learner)
        is_stopping = schedule.stops(finished)
        if is_stopping or schedule.saves(finished):
            with timers("save_checkpoint"):
                checkpoints.save(State(step=finished, metrics=metrics))
        tracker.log(metrics | end_step(timers, checkpoints), step=finished)
        if is_stopping:
            checkpoints.close()
            raise Stopped(finished)
    checkpoints.close()


def mean_loss(learner: Learner, *, pairs: PairStream, budget: Budget) -> Metrics:
    """Return the cross-entropy per response token over held-out pairs, in nats."""
    total = 0.0
    num_tokens = 0
    for batch in pairs.batches():
        watchdog.note(phase="validation")
        spread = learner.spread(batch)
        total -= float(spread.sum(spread.share.sums(learner.infer(spread, budget).log_probs)))
        num_tokens += len(batch.mask)
    return {"val/loss": total / num_tokens}


def preference_metrics(
    learner: Learner, *, pairs: PreferenceStream, objective: PreferenceObjective, budget: Budget
) -> Metrics:
    """Return the metrics of training, as means over all held-out pairs."""
    num_sequences = 2 * len(pairs)
    sums = Metrics()
    totals = Totals(num_tokens=num_sequences, num_sequences=num_sequences)
    for batch in pairs.batches():
        watchdog.note(phase="validation")
        spread = learner.spread(batch, num_together=budget.num_together)
        scores = spread.gather(learner.infer(spread, budget)).to(torch.float32)  # a sequence has one token
        _, metrics = objective(scores, batch, totals)
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in metrics.items()}
    return {name.replace("reward_model/", "val/"): value for name, value in sums.items()}
