"""The terms of the loss of an optimizer step, and the head that computes a term on a micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.losses import Totals
from megarl.batch import Rollouts
from megarl.learner.against import Against
from megarl.learner.outputs import LogitFactors, OutputHead
from megarl.learner.packed import Packed
from megarl.learner.passes import Bind
from megarl.learner.schedule import Head
from megarl.platform.device import to_device

Objective = Callable[[Any, Any, Totals], tuple[Tensor, dict[str, Tensor]]]
"""Takes outputs, samples and totals; returns loss and metrics. It gets entropies if its `needs_entropy` is True."""


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """One term of the loss of an optimizer step: samples, and an objective on them."""

    batch: Rollouts
    objective: Objective
    against: Against | None = None  # the exact divergence that the objective receives
    temperature: float | None = None  # of the probabilities that the objective receives; None: the learner's

    @property
    def needs_entropy(self) -> bool:
        """Whether the objective needs entropies."""
        return getattr(self.objective, "needs_entropy", False)


@dataclass(frozen=True, kw_only=True)
class MicroLoss:
    """The loss of one micro-batch in an update."""

    term: int  # its place among the terms of the step's loss
    samples: Tensor  # [b] int64, rows of the term's batch
    loss: Tensor  # scalar, without its graph
    metrics: dict[str, Tensor]
    outputs: Tensor  # [K, b, T], without their graph


def loss_of(number: int, term: LossTerm, outputs: OutputHead, device: torch.device, *, with_entropy: bool) -> Bind:
    """Return what makes heads that compute a term's share of the loss, and its `MicroLoss`.

    `number` is the term's place.
    """
    totals = Totals.of(term.batch.mask)

    def bind(packed: Packed, other: LogitFactors | None) -> Head:
        samples = term.batch.select(packed.samples).moved(partial(to_device, device=device))
        return partial(head, packed=packed, other=other, samples=samples)

    def head(
        hidden: Tensor, *, packed: Packed, other: LogitFactors | None, samples: Rollouts
    ) -> tuple[Tensor, Tensor, MicroLoss]:
        numbers = outputs.numbers(
            hidden, packed=packed, other=other, with_entropy=with_entropy, temperature=term.temperature
        )
        loss, metrics = term.objective(outputs.named(numbers, with_entropy=with_entropy), samples, totals)
        micro = MicroLoss(
            term=number,
            samples=packed.samples,
            loss=loss.detach().clone(),
            metrics=metrics,
            outputs=numbers.detach(),
        )
        return loss, torch.ones((), dtype=torch.int), micro

    return bind
