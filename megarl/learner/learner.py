"""One Megatron model and, if it learns, its optimizer: `infer`, `forward_backward` and `optim_step`.

Invariant: every rank calls with an index of the same samples, and with its own share. The learner divides the share
into micro-batches. No split changes a result: objectives return contributions to the global batch, and the learner only
adds them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megarl.batch import ROUTE_TYPES, Rollouts
from megarl.distributed.exchange import largest
from megarl.distributed.routes import Holders
from megarl.distributed.sharded import Sharded, shard
from megarl.learner.batching import Batching, Budget, Replays
from megarl.learner.contributions import add_metrics
from megarl.learner.experts import number_routers, prepare_routers, router_agreement
from megarl.learner.finite import Buffers, GradientStatus, NotFinite, explain_not_finite
from megarl.learner.forward import ForwardPass, ReferenceDivergence
from megarl.learner.layout import source_layout, weights
from megarl.learner.lora import MergedWeights, adapter_layout, adapter_weights, begin_dropout
from megarl.learner.offload import Offload
from megarl.learner.optimizer import Optimizer
from megarl.learner.outputs import OutputHead
from megarl.learner.overlap import weights_in_flight
from megarl.learner.parallel import Mesh
from megarl.learner.patches.cpu import megatron_platform
from megarl.learner.schedule import MicroBatch, run_schedule
from megarl.learner.terms import LossTerm, MicroLoss, loss_head
from megarl.models.architecture import Architecture
from megarl.models.lora import Lora
from megarl.platform.device import to_device
from megarl.reshard.layout import Layout

R = TypeVar("R", bound=Rollouts)
LOSS = "*"  # the key of the loss among the metrics of a step; no metric has this name


@dataclass(frozen=True, kw_only=True)
class ReducedGradient:
    """The gradient of a mini-batch, which lies in the model's buffers, and the numbers that all ranks know of it."""

    status: GradientStatus
    loss: float  # of the global mini-batch
    norm: float  # before clipping
    metrics: dict[str, float]  # of the objectives
    outputs: Any  # as `Learner.infer` returns them, if they were asked for
    buffers: Buffers  # before the backward pass
    losses: Sequence[MicroLoss]  # of this rank's micro-batches, on the last pipeline stage

    def discard(self) -> None:
        """Undo what the backward pass changed besides gradients: the buffers of the routers of experts."""
        self.buffers.restore()


@dataclass(kw_only=True, eq=False)
class Learner:
    """A sharded policy or value model."""

    models: tuple[GPTModel | DistributedDataParallel, ...]  # wrapped if there is an optimizer
    optimizer: Optimizer | None  # None: the model never learns
    offload: Offload
    mesh: Mesh
    architecture: Architecture
    temperature: float  # of the sampler whose log-probabilities a policy reports
    device: torch.device
    balance: bool  # spread samples over data-parallel ranks by length; False: by number
    lora: Lora | None  # the adapters of `models`
    uses_adapters: bool = True  # False: compute with the frozen weights alone
    replays: Replays  # what routers take of the routes of samples that have any

    def __post_init__(self) -> None:
        self._head = OutputHead(
            module=self.modules[-1], architecture=self.architecture, mesh=self.mesh, temperature=self.temperature
        )
        self.batching = Batching(
            mesh=self.mesh,
            config=self.modules[0].config,
            device=self.device,
            balance=self.balance,
            replays=self.replays,
            has_keys=self.lora is not None and self.lora.dropout > 0.0,
        )
        self.routed_layers = number_routers(self.modules, self.architecture.experts)
        self.forward = ForwardPass(
            models=self.models,
            head=self._head,
            batching=self.batching,
            offload=self.offload,
            mesh=self.mesh,
            uses_adapters=self.uses_adapters,
        )

    @cached_property
    def holders(self) -> Holders:
        """The ranks that replay the same routes. Collective at its first use."""
        return Holders.of(self.mesh.shares, tuple(self.routed_layers))

    @property
    def is_policy(self) -> bool:
        """True if the model reports log-probabilities, False if values."""
        return self._head.is_policy

    @property
    def modules(self) -> tuple[GPTModel, ...]:
        """The chunks of the GPTModel; a virtual pipeline has several."""
        return tuple(model.module for model in self.models) if self.optimizer else self.models

    def without_adapters(self, *, replays: Replays = "none") -> "Learner":
        """Return the model that this model was before it learned: it has the same memory, and never learns.

        `replays` is what its routers take of the routes of samples.
        """
        return replace(self, models=self.modules, optimizer=None, lora=None, uses_adapters=False, replays=replays)

    def layout(self) -> Layout:
        """Return the boxes of the Hugging Face parameters that this rank holds."""
        return source_layout(self.modules, self.architecture, self.mesh)

    @contextmanager
    def weights(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield the local parameters by name, merged with their adapters; they are on the device within the block."""
        with self.offload.parameters():
            yield MergedWeights(weights(self.modules), self.modules)

    def adapter_layout(self) -> Layout:
        """Return the boxes of PEFT's parameters that this rank holds."""
        return adapter_layout(self.modules)

    @contextmanager
    def adapters(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield the local matrices of the adapters by name; they are on the device within the block."""
        with self.offload.parameters():
            yield adapter_weights(self.modules)

    def spread(self, record: R, *, num_together: int = 1) -> Sharded[R]:
        """Keep this rank's share of a record that every rank has. `num_together` neighbours stay together."""
        units = torch.arange(len(record)) // num_together
        if record.routes is not None:
            record = replace(record, routes=record.routes[:, self.routed_layers])
        return shard(record, self.batching.owners(record.lengths(), units), self.mesh.shares)

    def infer(
        self,
        batch: Sharded[Rollouts],
        budget: Budget,
        *,
        against: ReferenceDivergence | None = None,
        with_entropy: bool = False,
        temperature: float | None = None,
    ) -> Any:
        """Compute log-probabilities, or values, of every response token of this rank's share.

        `temperature` replaces that of the learner.

        Returns:
            For a policy, `PolicyOutputs` of [N] float32, with entropies if asked for, and with the exact divergence
            if there is one.
            For a value model, [N] float32 values; the value at a token is that of the state before the token. All
            are zero outside the mask, on the host, and equal on the ranks of the last pipeline stage that have the same
            share. Ranks of other stages get zeros, as many as they have response tokens.
        """
        outputs, _ = self.forward.infer(batch, budget, against, with_entropy=with_entropy, temperature=temperature)
        return outputs

    def infer_with_routes(
        self, batch: Sharded[Rollouts], budget: Budget, *, against: ReferenceDivergence | None = None
    ) -> tuple[Any, Tensor]:
        """Return what `infer` does, with entropies, and the experts that the routers of this rank chose.

        The latter are `[M, L, k]`, as in `Rollouts`, of the share of this rank. The samples have no routes.
        """
        experts = self.architecture.experts
        assert experts is not None, "a model without experts has no routes"
        outputs, routes = self.forward.infer(
            batch, budget, against, with_entropy=True, temperature=None, with_routes=True
        )
        assert routes is not None, "routes that were asked for"
        return outputs, routes.to(ROUTE_TYPES[experts.number_bytes])

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Overlap gathers of weights within the block. Afterwards weights are complete, and offloaded if configured."""
        try:
            with weights_in_flight(self.models):
                yield
        finally:
            self.offload.release()

    def forward_backward(
        self, terms: Sequence[LossTerm], budget: Budget, *, with_outputs: bool = False
    ) -> ReducedGradient:
        """Compute the gradient of the sum of `terms`, which every rank gives alike, in the model's buffers.

        Gradients, weights and the optimizer's state stay on the device until the end of the next `learning` block.

        Args:
            terms: the terms of the loss of one mini-batch; the batch of the first has a response token.
            budget: the size of a micro-batch.
            with_outputs: keep what `infer` returns, with entropies, for the batch of the first term.
        """
        assert self.optimizer is not None, "this model does not learn"
        on_device = partial(to_device, device=self.device)
        micro_batches = [
            replace(
                micro_batch,
                term=number,
                samples=term.batch.share.select(micro_batch.row.samples).laid_out(on_device),
            )
            for number, term in enumerate(terms)
            for micro_batch in self.forward.divide(term.batch, budget, term.against)
        ]
        self.offload.fetch()  # after the micro-batches, which would queue behind it
        for model in self.models:
            model.train()
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        begin_dropout(self.modules, self.optimizer.next_pass())
        prepare_routers(self.modules, sum(int((term.batch.index.lengths - 1).sum()) for term in terms))
        buffers = Buffers(self.modules)
        losses: list[MicroLoss] = run_schedule(
            self.models,
            micro_batches,
            loss_head(terms, self._head, with_entropy=with_outputs),
            budget.row_length(self.mesh),
            forward_only=False,
        )
        outputs = self._outputs_of_first(terms[0], micro_batches, losses) if with_outputs else None
        metrics = add_metrics([micro.metrics | {LOSS: micro.loss} for micro in losses], self.mesh, self.device)
        loss = metrics.pop(LOSS)
        if self.replays != "none" and terms[0].batch.share.routes is not None:
            metrics["router_agreement"] = router_agreement(self.modules)
        self.offload.await_optimizer()
        with megatron_platform():
            norm = self.optimizer.grad_norm()
        return ReducedGradient(
            status=GradientStatus(largest(GradientStatus.of(loss, norm))),
            loss=loss,
            norm=norm,
            metrics=metrics,
            outputs=outputs,
            buffers=buffers,
            losses=losses,
        )

    def optim_step(self, gradient: ReducedGradient) -> None:
        """Change the weights by the gradient that `forward_backward` has left in the model's buffers."""
        assert self.optimizer is not None, "this model does not learn"
        with megatron_platform():
            self.optimizer.step(gradient.norm)

    def explain_not_finite(self, gradient: ReducedGradient, terms: Sequence[LossTerm]) -> NotFinite:
        """Explain on all ranks why the gradient of `terms` is not finite. Collective."""
        bad = [
            (micro.term, terms[micro.term].batch.mine[micro.samples].tolist())
            for micro in gradient.losses
            if not bool(micro.loss.isfinite())
        ]
        return explain_not_finite(self.modules, bad, num_terms=len(terms), loss=gradient.loss, grad_norm=gradient.norm)

    def _outputs_of_first(
        self, term: LossTerm, micro_batches: Sequence[MicroBatch], losses: Sequence[MicroLoss]
    ) -> Any:
        """Return the outputs on this rank's share of the first term, which the loss has received."""
        return self.forward.join_outputs(
            term.batch.share,
            [micro_batch for micro_batch in micro_batches if micro_batch.term == 0],
            [micro.outputs for micro in losses if micro.term == 0],
            with_entropy=True,
            with_kl=term.against is not None,
        )
