"""The optimizer steps of an update: one on each mini-batch, unless there is nothing sound to learn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megarl.learner.batching import Budget
from megarl.learner.finite import GradientStatus
from megarl.learner.learner import Learner, ReducedGradient
from megarl.learner.terms import LossTerm
from megarl.training.interfaces import Metrics
from megarl.training.skips import Skips


@dataclass
class Tally:
    """The mini-batches of an update, by what became of them."""

    learned: list[Metrics] = field(default_factory=list)  # with a finite gradient, which may be 0
    skipped: int = 0  # whose loss or gradient was not finite
    empty: int = 0  # without a response token
    idle: int = 0  # whose gradient was exactly 0

    def metrics(self) -> Metrics:
        """Return the mean of each metric over the mini-batches with a finite gradient, and the counts of the others."""
        names = self.learned[0] if self.learned else ()
        means = {name: sum(metrics[name] for metrics in self.learned) / len(self.learned) for name in names}
        counts = {"skipped_updates": self.skipped, "empty_minibatches": self.empty, "idle_minibatches": self.idle}
        return means | {name: float(count) for name, count in counts.items()}


def update(
    learner: Learner,
    minibatches: Iterable[Sequence[LossTerm]],
    budget: Budget,
    *,
    skips: Skips | None = None,
    step: int = 0,
    gradient: ReducedGradient | None = None,
) -> Metrics:
    """Take one optimizer step on each global mini-batch; one call is one step of the learning-rate schedule.

    A mini-batch whose first term has no response token is left out. A mini-batch whose loss or gradient is not finite
    is skipped on all ranks, and so is one whose gradient is exactly 0, which has nothing to teach: momentum and weight
    decay would move the weights. Weights, optimizer and routers then stay as they were before it.

    Args:
        learner: the model.
        minibatches: the terms of the loss of each mini-batch.
        budget: the size of a micro-batch.
        skips: handles mini-batches whose loss or gradient is not finite; None: nothing does.
        step: the step of the run, counted from 0.
        gradient: that of the first mini-batch, if `learner.forward_backward` has computed it.

    Returns:
        The mean of each metric and of `grad_norm` (before clipping) over the mini-batches with a finite gradient, if
        any, and always `skipped_updates`, `empty_minibatches`, `idle_minibatches` (gradient 0) and `lr`.

    Raises:
        UserError: on all ranks alike, if too many mini-batches in a row were skipped.
    """
    assert learner.optimizer is not None, "this model does not learn"
    learner.optimizer.advance_schedule()
    tally = Tally()
    with learner.learning():
        for number, terms in enumerate(minibatches):
            if not terms[0].batch.index.num_learnt.any():
                tally.empty += 1
                continue
            if gradient is None:
                gradient = learner.forward_backward(terms, budget)
            problem = None
            match gradient.status:
                case GradientStatus.LEARN:
                    learner.optim_step(gradient)
                case GradientStatus.IDLE:
                    gradient.discard()
                    tally.idle += 1
                case GradientStatus.NOT_FINITE:
                    gradient.discard()
                    problem = learner.explain_not_finite(gradient, terms)
                    tally.skipped += 1
            if problem is None:
                tally.learned.append(gradient.metrics | {"grad_norm": gradient.norm})
            if skips:
                skips.note(problem, terms, step=step + 1, minibatch=number)
            gradient = None
    return tally.metrics() | {"lr": learner.optimizer.lr}
