"""The loop's nouns: protocols of sampling, scoring, learning and saving, as the algorithm sees them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from torch import Tensor

from megarl.algorithms.losses import PolicyOutputs
from megarl.batch import Experience, Group, Prompts, Rewarded, Rollouts, Scored
from megarl.checkpoint.state import State
from megarl.data.order import Position
from megarl.distributed.sharded import Sharded
from megarl.rewards.collective import ScoringMetrics
from megarl.tracking.timers import Timers

Metrics = dict[str, float]


class PromptSource(Protocol):
    """Prompts as a pure function of a position."""

    def take(self, position: Position, count: int | None = None) -> tuple[Prompts, Position]:
        """Return the next `count` prompts, by default as many as a step needs, and the position after them."""

    def batches(self) -> Iterator[Prompts]:
        """Yield every prompt once, for validation."""


class Session(Protocol):
    """The samples of a step that the engine draws, as groups of the samples of a prompt, by number."""

    @property
    def num_open(self) -> int:
        """The number of groups that are not complete."""

    def add(self, groups: dict[int, Group]) -> None:
        """Draw the incomplete samples of further groups."""

    def advance(self) -> dict[int, Group]:
        """Take a number of engine steps, and return the groups that became complete."""

    def stop(self) -> dict[int, Group]:
        """Stop all open groups, and return them as far as they are drawn."""

    def occupancy(self) -> float:
        """Return the share of the engine's slots that drew a sample, over all engine steps."""


class Sampler(Protocol):
    """The rollout engine with the actor's weights."""

    def awake(self, timers: Timers, *, step: int) -> AbstractContextManager[Metrics]:
        """Bring the actor's weights of `step` finished steps to the engine, which generates within the block.

        Yields metrics of the agreement between engine and trainer. Raises before the block if they do not agree.
        """

    def open(self, *, step: int, keeps_stopped: bool = False) -> Session:
        """Begin to draw training samples. `keeps_stopped`: a group that is stopped keeps its tokens."""

    def record(self, groups: Sequence[Group]) -> Sharded[Rollouts]:
        """Return the record of complete groups."""

    def groups(self, prompts: Prompts, *, step: int, batch: int = 0) -> Sequence[Group]:
        """Return new groups of training samples. A later `batch` of a step has other samples of the same prompt."""

    def generate(self, prompts: Prompts, *, step: int) -> tuple[Sharded[Rollouts], Metrics]:
        """Draw the training samples of a step."""

    def greedy(self, prompts: Prompts, *, step: int) -> Sharded[Rollouts]:
        """Generate one response to each prompt from the likeliest tokens."""

    def validate(self, prompts: Prompts, *, step: int) -> Sharded[Rollouts]:
        """Draw samples for the validation."""


class Scorer(Protocol):
    """The reward."""

    def score(self, samples: Sharded[Rollouts]) -> tuple[Sharded[Scored], ScoringMetrics]:
        """Score every sample. Return metrics of the scoring too, the same on every rank. Collective."""

    def forget(self) -> None:
        """Forget finished responses that will not be scored."""


class Reference(Protocol):
    """A policy that never learns."""

    def infer(self, batch: Sharded[Rollouts]) -> PolicyOutputs:
        """Return the log-probabilities of the response tokens of this rank's share."""


class Gradient(Protocol):
    """The gradient of a mini-batch, before the optimizer step."""

    @property
    def outputs(self) -> PolicyOutputs:
        """The policy's outputs on the mini-batch, with entropies."""

    def discard(self) -> None:
        """Undo what the backward pass changed besides gradients."""


G = TypeVar("G", bound=Gradient)


class Policy(Reference, Protocol[G]):
    """The actor. Its outputs have entropies."""

    def take(self, samples: Sharded[Rewarded], *, step: int) -> Sharded[Rewarded]:
        """Bring the samples of a step to the ranks that learn from them. Collective."""

    def infer_first(self, samples: Sharded[Rewarded]) -> tuple[PolicyOutputs, Sharded[Rewarded]]:
        """Return the outputs before the update, and the samples with what the update keeps of this pass."""

    def forward_backward(self, experience: Sharded[Experience], *, step: int) -> G:
        """Compute the gradient of a step that has one mini-batch, and the outputs on it."""

    def update(self, experience: Sharded[Experience], *, step: int, gradient: G | None = None) -> Metrics:
        """Learn from the experience of one step. Return metrics.

        `gradient` is that of the experience, if `forward_backward` has computed it.
        """


class Critic(Protocol):
    """A model of the return."""

    def infer(self, batch: Sharded[Rollouts]) -> Tensor:
        """Return the values of the states before each response token of this rank's share, `[n]` float32."""

    def update(self, experience: Sharded[Experience], *, step: int) -> Metrics:
        """Learn from the experience of one step. Return metrics."""


class Checkpoints(Protocol):
    """The checkpoints of a run."""

    def save(self, state: State) -> None:
        """Save the models and the state of the run."""

    def advance(self) -> Metrics:
        """Advance asynchronous saves without waiting. Called once after every step. Return metrics."""

    def close(self) -> None:
        """Wait until everything that was saved is complete. Called at the end of a run."""
