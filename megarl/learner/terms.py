"""The terms of the loss of an optimizer step, and the head that computes a term on a micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.losses import Totals
from megarl.batch import Rollouts
from megarl.distributed.sharded import Sharded
from megarl.learner.forward import ReferenceDivergence
from megarl.learner.outputs import OutputHead
from megarl.learner.schedule import Head, MicroBatch

Objective = Callable[[Any, Any, Totals], tuple[Tensor, dict[str, Tensor]]]
"""Takes outputs, samples and totals; returns loss and metrics. It gets entropies if its `needs_entropy` is True."""


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """One term of the loss of an optimizer step: samples, and an objective on them."""

    batch: Sharded[Rollouts]
    objective: Objective
    against: ReferenceDivergence | None = None  # the exact divergence that the objective receives
    temperature: float | None = None  # of the probabilities that the objective receives; None: the learner's

    @property
    def needs_entropy(self) -> bool:
        """Whether the objective needs entropies."""
        return getattr(self.objective, "needs_entropy", False)


@dataclass(frozen=True, kw_only=True)
class MicroLoss:
    """The loss of one micro-batch in an update."""

    term: int  # the number of the loss term
    samples: Tensor  # [b] int64, places in the share of the term's batch
    loss: Tensor  # scalar, without its graph
    metrics: dict[str, Tensor]
    outputs: Tensor  # [K, b, T], without their graph


def loss_head(terms: Sequence[LossTerm], outputs: OutputHead, *, with_entropy: bool) -> Head:
    """Return the head of an update: it computes the loss of a micro-batch, and its `MicroLoss`.

    Args:
        terms: the terms of the loss; a micro-batch names its term.
        outputs: computes what the objectives receive.
        with_entropy: compute entropies for the first term even if its objective needs none.
    """
    totals = [Totals.of(term.batch.index.num_learnt) for term in terms]
    entropies = [term.needs_entropy or (with_entropy and number == 0) for number, term in enumerate(terms)]

    def head(hidden: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, MicroLoss]:
        number = micro_batch.term
        row = micro_batch.row
        term = terms[number]
        found = outputs.token_outputs(
            hidden,
            packed=row,
            other=micro_batch.other,
            with_entropy=entropies[number],
            temperature=term.temperature,
        )
        received = outputs.as_outputs(found, with_entropy=entropies[number])
        loss, metrics = term.objective(received, micro_batch.samples, totals[number])
        micro = MicroLoss(
            term=number,
            samples=row.samples,
            loss=loss.detach().clone(),
            metrics=metrics,
            outputs=found.detach(),
        )
        return loss, torch.ones((), dtype=torch.int), micro

    return head
