"""Learning from files without an engine: the loop of supervised fine-tuning and of training a reward model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from megarl.batch import Rollouts
from megarl.checkpoint.state import State
from megarl.learner.batching import Budget
from megarl.learner.learner import Learner, Objective
from megarl.tracking.timers import Timers
from megarl.tracking.tracker import Tracker
from megarl.training.interfaces import Checkpoints, Metrics
from megarl.training.skips import Skips
from megarl.training.steps import Schedule, run_steps


class Batches(Protocol):
    """Training data. Their order is a pure function of the step."""

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass."""

    def take(self, step: int) -> Rollouts:
        """Return the batch of a step, counted from 0 over all epochs."""

    def first_as_read(self, step: int) -> str:
        """Describe for people how the model reads the first row of a step."""


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """The data and the objective of a model that learns from files."""

    role: Literal["policy", "value"]
    name: str  # of the model in checkpoints
    batches: Batches
    objective: Objective
    budget: Budget
    validate: Callable[[Learner], Metrics] | None  # None: nothing to validate on


def train(
    learner: Learner,
    lessons: Lessons,
    schedule: Schedule,
    *,
    skips: Skips,
    tracker: Tracker,
    checkpoints: Checkpoints,
) -> None:
    """Run the steps of the schedule. Raises what `run_steps` does."""

    def step(number: int, timers: Timers) -> Metrics:
        with timers("step"):
            batches, on_minibatch = [lessons.batches.take(number)], skips.of_step(number + 1)
            return learner.update(batches, lessons.objective, lessons.budget, on_minibatch=on_minibatch)

    validate = lessons.validate
    run_steps(
        schedule,
        step=step,
        validate=(lambda finished, timers: validate(learner)) if validate else None,
        state=lambda finished, metrics: State(step=finished, metrics=metrics),
        tracker=tracker,
        checkpoints=checkpoints,
    )
