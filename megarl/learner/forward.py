"""Forward passes of a batch: its micro-batches on this rank, and the outputs on this rank's share.

`against` computes an exact divergence from other policies with the same vocabulary and mesh. The other policies run
first, on the same micro-batches and ranks; their hidden states wait in host memory until the policy needs them. These
are a few thousand numbers for each response token, and no rank sends any of them. A micro-batch has samples of one of
the other policies alone.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megarl.algorithms.kl import Divergence
from megarl.batch import Rollouts
from megarl.distributed.sharded import Sharded
from megarl.learner.batching import Batching, Budget
from megarl.learner.lora import adapters_off
from megarl.learner.offload import Offload
from megarl.learner.outputs import LogitFactors, OutputHead
from megarl.learner.parallel import Mesh
from megarl.learner.per_data_source import PerDataSource
from megarl.learner.routes import join_choices
from megarl.learner.schedule import Head, MicroBatch, run_schedule


@dataclass(frozen=True, kw_only=True)
class ReferenceDivergence:
    """An exact divergence, and the policies that it is taken from."""

    policies: "PerDataSource[ForwardPass]"
    divergence: Divergence


@dataclass(frozen=True, kw_only=True)
class ForwardPass:
    """The forward passes of one model, by the parts of its `Learner`."""

    models: tuple[GPTModel | DistributedDataParallel, ...]
    head: OutputHead
    batching: Batching
    offload: Offload
    mesh: Mesh
    uses_adapters: bool  # False: the chunks compute with their frozen weights alone

    def infer(
        self,
        batch: Sharded[Rollouts],
        budget: Budget,
        against: ReferenceDivergence | None,
        *,
        with_entropy: bool,
        temperature: float | None,
        with_routes: bool = False,
    ) -> tuple[Any, Tensor | None]:
        """Return the outputs on this rank's share of a batch, as `Learner.infer` does, and the routes of the pass."""

        def head(hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
            return self.head.token_outputs(
                hidden,
                packed=micro_batch.row,
                other=micro_batch.other,
                with_entropy=with_entropy,
                temperature=temperature,
            )

        micro_batches = self.divide(batch, budget, against)
        if with_routes:
            micro_batches = [replace(micro_batch, choices=[]) for micro_batch in micro_batches]
        outputs = self._run(micro_batches, head, budget)
        joined = self.join_outputs(
            batch.share, micro_batches, outputs, with_entropy=with_entropy, with_kl=against is not None
        )
        return joined, join_choices(batch.share, micro_batches, self.mesh) if with_routes else None

    def divide(self, batch: Sharded[Rollouts], budget: Budget, against: ReferenceDivergence | None) -> list[MicroBatch]:
        """Return this rank's micro-batches, each with the logit factors of its other policy, if any."""
        micro_batches = list[MicroBatch]()
        share = batch.share
        everything = torch.arange(len(batch))
        for other, of_other in against.policies.shares(batch.index) if against else [(None, everything)]:
            local = batch.local(of_other)
            divided = self.batching.divide(share.select(local), budget)
            samples = [local[micro].tolist() for micro in divided]
            factors: Sequence[LogitFactors | None] = [None] * len(samples)
            if against and other:
                factors = other.logit_factors(share, samples, budget, against.divergence)
            rows = self.batching.pack(share, samples)
            micro_batches += [MicroBatch(row=row, other=of_row) for row, of_row in zip(rows, factors, strict=True)]
        return micro_batches

    def logit_factors(
        self, share: Rollouts, samples: list[list[int]], budget: Budget, divergence: Divergence
    ) -> Sequence[LogitFactors | None]:
        """Return this policy's `LogitFactors` on each micro-batch; None before the last pipeline stage."""

        def head(hidden: Tensor, micro_batch: MicroBatch) -> LogitFactors:
            return self.head.logit_factors(hidden, packed=micro_batch.row, divergence=divergence)

        micro_batches = [MicroBatch(row=row) for row in self.batching.pack(share, samples)]
        return self._run(micro_batches, head, budget) or [None] * len(micro_batches)

    def _run(self, micro_batches: Sequence[MicroBatch], head: Head, budget: Budget) -> list[Any]:
        """Run micro-batches forward only; return what the head returns for each, on the last pipeline stage."""
        for model in self.models:
            model.eval()
        weights = nullcontext() if self.uses_adapters else adapters_off(self.models)
        with torch.no_grad(), self.offload.parameters(), weights:
            return run_schedule(self.models, micro_batches, head, budget.row_length(self.mesh), forward_only=True)

    def join_outputs(
        self,
        share: Rollouts,
        micro_batches: Sequence[MicroBatch],
        outputs: Sequence[Tensor],
        *,
        with_entropy: bool,
        with_kl: bool,
    ) -> Any:
        """Return the outputs of all micro-batches of a share in its order, as `Learner.infer` returns them."""
        num_outputs = self.head.num_outputs(with_entropy=with_entropy, with_kl=with_kl)
        joined = torch.zeros(num_outputs, len(share.mask))
        if outputs:  # only the last pipeline stage has any
            rows = torch.cat([numbers.flatten(1) for numbers in outputs], dim=1).cpu()  # the host waits once
            parts = rows.split([numbers[0].numel() for numbers in outputs], dim=1)
            places = joined.split(share.num_tokens.tolist(), dim=1)
            for micro_batch, numbers, part in zip(micro_batches, outputs, parts, strict=True):
                for sample, row in zip(micro_batch.row.samples.tolist(), part.view_as(numbers).unbind(1), strict=True):
                    places[sample].copy_(row[:, : places[sample].shape[1]])
        return self.head.as_outputs(list(joined), with_entropy=with_entropy)
