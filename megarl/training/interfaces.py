"""The loop's nouns: what sampling, scoring, learning and saving look like to the algorithm."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from megarl.algorithms.losses import PolicyOutputs
from megarl.batch import Experience, Prompts, Rollouts, Scored
from megarl.checkpoint.state import State
from megarl.data.order import Position
from megarl.tracking.timers import Timers

Metrics = dict[str, float]


class PromptSource(Protocol):
    """Prompts as a pure function of a position."""

    def take(self, position: Position, count: int | None = None) -> tuple[Prompts, Position]:
        """The next `count` prompts, those of one iteration where it is None, and the position behind them."""

    def batches(self) -> Iterator[Prompts]:
        """Every prompt once, for validation."""


class Sampler(Protocol):
    """The rollout engine, with the actor's weights."""

    def awake(self, timers: Timers, *, step: int) -> AbstractContextManager[Metrics]:
        """Bring the actor's weights of `step` finished steps into the engine; within the block it generates.

        Gives metrics of the engine's agreement with the trainer, and does not get there where they do not agree.
        """

    def generate(self, prompts: Prompts, *, step: int, batch: int = 0) -> Rollouts:
        """Samples to learn from; of a prompt that comes again in a later `batch` of the step, other ones."""

    def greedy(self, prompts: Prompts, *, step: int) -> Rollouts:
        """The one response to each prompt that takes the likeliest token every time."""

    def validate(self, prompts: Prompts, *, step: int) -> Rollouts:
        """Samples to judge the actor by."""


class Scorer(Protocol):
    """The reward."""

    def score(self, rollouts: Rollouts) -> tuple[Scored, Metrics]:
        """Score every sample; with metrics of the scoring, the same on every rank."""


class Policy(Protocol):
    """A model of the next token: the actor, or the reference, which is never updated."""

    def infer(self, batch: Rollouts) -> PolicyOutputs:
        """Log-probabilities and entropies of the response tokens."""

    def update(self, experience: Experience, *, step: int) -> Metrics:
        """Learn from one iteration; returns metrics."""


class Critic(Protocol):
    """A model of the return."""

    def infer(self, batch: Rollouts) -> Tensor:
        """[B, T] float32 values of the states before each response token."""

    def update(self, experience: Experience, *, step: int) -> Metrics:
        """Learn from one iteration; returns metrics."""


class Checkpoints(Protocol):
    """What outlives the process."""

    def save(self, state: State) -> None:
        """Save the models, and what the run knows beside them."""

    def advance(self) -> Metrics:
        """Bring what is saved beside training further; once after every step. Returns metrics."""

    def close(self) -> None:
        """Wait until all that was saved is whole; at the end of a run."""
