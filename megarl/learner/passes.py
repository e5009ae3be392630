"""Passes of a batch through a model: its micro-batches on this rank, and what their heads read, on all ranks.

`against` computes an exact divergence from other policies with the same vocabulary and mesh. The other policies run
first, on the same micro-batches and ranks; their hidden states wait in host memory until the policy needs them. These
are a few thousand numbers for each response token, and no rank sends any of them. A micro-batch has samples of one of
the other policies alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.kl import Divergence
from megarl.batch import Rollouts
from megarl.learner.against import Against
from megarl.learner.batching import Batching, Budget
from megarl.learner.contributions import add_outputs
from megarl.learner.offload import Offload
from megarl.learner.outputs import LogitFactors, OutputHead
from megarl.learner.packed import Packed
from megarl.learner.parallel import Mesh
from megarl.learner.schedule import Head, MicroBatch, run_schedule

Bind = Callable[[Packed, LogitFactors | None], Head]  # brings what the head needs to the device, before any work on it


class Passes:
    """The passes of one model."""

    def __init__(
        self,
        models: tuple[Any, ...],
        head: OutputHead,
        batching: Batching,
        *,
        offload: Offload,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self._models, self._head, self._batching = models, head, batching
        self._offload, self._mesh, self._device = offload, mesh, device

    def read(
        self,
        batch: Rollouts,
        budget: Budget,
        against: Against | None,
        *,
        with_entropy: bool,
        temperature: float | None,
    ) -> Any:
        """Run a batch forward, and return what the head reads from it, as `Learner.infer` does."""

        def bind(packed: Packed, other: LogitFactors | None) -> Head:
            return partial(
                self._head.numbers, packed=packed, other=other, with_entropy=with_entropy, temperature=temperature
            )

        work = self.divide(batch, budget, bind, against)
        numbers = self.forward(work, budget)
        return self.everywhere(batch, work, numbers, with_entropy=with_entropy, with_kl=against is not None)

    def divide(self, batch: Rollouts, budget: Budget, bind: Bind, against: Against | None) -> list[MicroBatch]:
        """Return this rank's micro-batches, each with what `bind` makes of it and its other policy's logit factors."""
        work = list[MicroBatch]()
        everything = torch.arange(len(batch))
        for other, share in against.policies.shares(batch) if against else [(None, everything)]:
            divided = self._batching.divide(batch.select(share), budget)
            samples = [share[micro].tolist() for micro in divided]
            factors = [None] * len(samples)
            if against and other:
                factors = other.passes.logit_factors(batch, samples, budget, against.divergence)
            rows = self._batching.pack(batch, samples)
            work += [(row, bind(row, of_row)) for row, of_row in zip(rows, factors, strict=True)]
        return work

    def logit_factors(
        self, batch: Rollouts, samples: list[list[int]], budget: Budget, divergence: Divergence
    ) -> list[Any]:
        """Return this policy's `LogitFactors` on each micro-batch; None before the last pipeline stage."""
        head = partial(self._head.logit_factors, divergence=divergence)
        work = [(row, partial(head, packed=row)) for row in self._batching.pack(batch, samples)]
        return self.forward(work, budget) or [None] * len(work)

    def forward(self, work: Sequence[MicroBatch], budget: Budget) -> list[Any]:
        """Run micro-batches forward only; return what their heads return, on the last pipeline stage."""
        for model in self._models:
            model.eval()
        with torch.no_grad(), self._offload.parameters():
            return run_schedule(self._models, work, budget.row_length(self._mesh), forward_only=True)

    def everywhere(
        self,
        batch: Rollouts,
        work: Sequence[MicroBatch],
        numbers: Sequence[Tensor],
        *,
        with_entropy: bool,
        with_kl: bool,
    ) -> Any:
        """Bring the numbers of all micro-batches of `batch` to all ranks, as `Learner.infer` returns them."""
        num_outputs = self._head.num_outputs(with_entropy=with_entropy, with_kl=with_kl)
        whole = add_outputs(work, numbers, batch.mask, self._mesh, num_outputs=num_outputs, device=self._device)
        return self._head.named(whole, with_entropy=with_entropy)
