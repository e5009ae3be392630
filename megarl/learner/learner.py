"""One Megatron model and, if it learns, its optimizer: `infer` reads numbers off a batch, `update` learns from batches.

Invariant: every rank calls with the same batch and receives the same result. The learner itself spreads the samples
over data-parallel ranks and micro-batches. No split changes a result: objectives return contributions to the global
batch, and the learner only adds them.

`against` computes an exact divergence from other policies with the same vocabulary and mesh. The other policies run
first, on the same micro-batches and ranks; their hidden states wait in host memory until the policy needs them. These
are a few thousand numbers for each response token, and no rank sends any of them. A micro-batch has samples of one of
the other policies alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.kl import Divergence
from megarl.algorithms.losses import Totals
from megarl.batch import Rollouts
from megarl.learner.against import Against
from megarl.learner.batching import Batching, Budget
from megarl.learner.contributions import add_metrics, add_outputs, any_rank
from megarl.learner.experts import share_batch_size
from megarl.learner.finite import Buffers, NotFinite, explain_not_finite
from megarl.learner.layout import source_layout, weights
from megarl.learner.offload import Offload
from megarl.learner.optimizer import Optimizer
from megarl.learner.outputs import LogitFactors, OutputHead
from megarl.learner.packed import Packed
from megarl.learner.parallel import Mesh
from megarl.learner.patches.cpu import megatron_platform
from megarl.learner.schedule import MicroBatch, run_schedule
from megarl.models.architecture import Architecture
from megarl.reshard.layout import Layout

Objective = Callable[[Any, Any, Totals], tuple[Tensor, dict[str, Tensor]]]
LOSS = "*"  # the key of the loss among the metrics of a step; no metric has this name


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """One term of the loss of an optimizer step: samples, and an objective on them."""

    batch: Rollouts
    objective: Objective
    against: Against | None = None  # the exact divergence that the objective receives
    temperature: float | None = None  # of the probabilities that the objective receives; None: the learner's


OnMinibatch = Callable[[int, Sequence[LossTerm], NotFinite | None], None]  # its number; its loss; why it is skipped
Review = Callable[[Any], Rollouts | None]  # takes the outputs on a mini-batch, returns samples to learn from instead


@dataclass(frozen=True, kw_only=True)
class MicroLoss:
    """The loss of one micro-batch in an update."""

    term: int  # its place among the terms of the step's loss
    samples: Tensor  # [b] int64, rows of the term's batch
    loss: Tensor  # scalar, without its graph
    metrics: dict[str, Tensor]
    outputs: Tensor  # [K, b, T], without their graph


class Learner:
    """A sharded policy or value model."""

    def __init__(
        self,
        *,
        models: tuple[Any, ...],  # GPTModel, or Megatron's DistributedDataParallel around it if there is an optimizer
        optimizer: Optimizer | None,  # None: the model never learns
        offload: Offload,
        mesh: Mesh,
        architecture: Architecture,
        temperature: float,  # of the sampler whose log-probabilities a policy reports
        device: torch.device,
        balance: bool = True,  # spread samples over data-parallel ranks by length; False: by number
    ) -> None:
        self.models, self.optimizer, self.offload = models, optimizer, offload
        self.mesh, self.architecture, self.device = mesh, architecture, device
        self._batching = Batching(mesh, self.modules[0].config, device, balance=balance)
        self._head = OutputHead(self.modules[-1], architecture, mesh, temperature=temperature)

    @property
    def is_policy(self) -> bool:
        """True if the model reports log-probabilities, False if values."""
        return self._head.is_policy

    @property
    def modules(self) -> tuple[Any, ...]:
        """The chunks of the GPTModel; a virtual pipeline has several."""
        return tuple(model.module for model in self.models) if self.optimizer else self.models

    def layout(self) -> Layout:
        """Return the boxes of the Hugging Face parameters that this rank holds."""
        return source_layout(self.modules, self.architecture, self.mesh)

    @contextmanager
    def weights(self) -> Iterator[dict[str, Tensor]]:
        """Yield the local parameters by name; they are on the device within the block."""
        with self.offload.parameters():
            yield weights(self.modules)

    def infer(
        self, batch: Rollouts, budget: Budget, *, against: Against | None = None, temperature: float | None = None
    ) -> Any:
        """Compute log-probabilities and entropies, or values, of every response token; `temperature` replaces its own.

        Returns:
            For a policy, `PolicyOutputs` of [B, T] float32, with the exact divergence if there is one.
            For a value model, [B, T] float32 values; the value at a token is that of the state before the token. All
            are zero outside `batch.mask`, on the host, and equal on all ranks.
        """
        work = self._micro_batches(batch, budget, partial(self._head.numbers, temperature=temperature), against)
        return self._outputs(batch, work, self._read(work, budget), with_kl=against is not None)

    def update(
        self,
        minibatches: Iterable[Rollouts],
        objective: Objective,
        budget: Budget,
        *,
        against: Against | None = None,
        extra_terms: Iterable[LossTerm] | None = None,
        on_minibatch: OnMinibatch | None = None,
        review: Review | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step on each global mini-batch; one call is one step of the learning-rate schedule.

        A mini-batch without a response token is left out, together with its extra term. A mini-batch whose loss or
        gradient is not finite is skipped on all ranks: weights, optimizer and routers stay as they were before it.

        Args:
            against: the exact divergence that the objective receives.
            extra_terms: a second term of the loss of every mini-batch; may be endless.
            on_minibatch: called after each mini-batch that is not left out; may raise.
            review: called with the outputs on each mini-batch, as `infer` returns them, before the step; may raise, and
                nothing is learned then. If it returns other samples, the step is taken on them, without a review.

        Returns:
            The mean of each metric and of `grad_norm` (before clipping) over the steps that were taken, if any, and
            always `skipped_updates`, `empty_minibatches` and `lr`.
        """
        assert self.optimizer is not None, "this model does not learn"
        self.optimizer.advance_schedule()
        extras = repeat(()) if extra_terms is None else ((term,) for term in extra_terms)
        results = list[dict[str, float] | NotFinite | None]()
        with self.offload.everything():
            for number, (minibatch, extra) in enumerate(zip(minibatches, extras, strict=False)):
                terms = (LossTerm(batch=minibatch, objective=objective, against=against), *extra)
                if not minibatch.mask.any():
                    results.append(None)
                    continue
                learned, result = self._step(terms, budget, review)
                results.append(result)
                if on_minibatch:
                    on_minibatch(number, learned, result if isinstance(result, NotFinite) else None)
        return _summary(results) | {"lr": self.optimizer.lr}

    def _step(
        self, terms: Sequence[LossTerm], budget: Budget, review: Review | None = None
    ) -> tuple[Sequence[LossTerm], dict[str, float] | NotFinite]:
        """Take an optimizer step on the sum of `terms`, or on what the review puts in the place of the first.

        Return the terms, and the metrics of the step or why it was not taken.
        """
        assert self.optimizer is not None
        work = [micro for number, term in enumerate(terms) for micro in self._of_term(number, term, budget)]
        for model in self.models:
            model.train()
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        share_batch_size(self.modules, sum(int((term.batch.lengths() - 1).sum()) for term in terms))
        buffers = Buffers(self.modules)
        losses: list[MicroLoss] = run_schedule(self.models, work, budget.row_length(self.mesh), forward_only=False)
        if review:
            term, numbers = terms[0], [micro.outputs for micro in losses if micro.term == 0]
            outputs = self._outputs(term.batch, work[: len(numbers)], numbers, with_kl=term.against is not None)
            try:
                others = review(outputs)
            except BaseException:
                buffers.restore()
                raise
            if others is not None:
                buffers.restore()
                return self._step((replace(term, batch=others), *terms[1:]), budget)
        metrics = add_metrics([micro.metrics | {LOSS: micro.loss} for micro in losses], self.mesh, self.device)
        loss = metrics.pop(LOSS)
        with megatron_platform():
            grad_norm = self.optimizer.grad_norm()
        if any_rank(not (math.isfinite(loss) and math.isfinite(grad_norm)), self.device):
            buffers.restore()
            bad = [(micro.term, micro.samples.tolist()) for micro in losses if not bool(micro.loss.isfinite())]
            reason = explain_not_finite(self.modules, bad, num_terms=len(terms), loss=loss, grad_norm=grad_norm)
            return terms, reason
        with megatron_platform():
            self.optimizer.step(grad_norm)
        return terms, metrics | {"grad_norm": grad_norm}

    def _of_term(self, number: int, term: LossTerm, budget: Budget) -> list[MicroBatch]:
        """Return the micro-batches of a term, with heads that compute its loss."""
        totals = Totals.of(term.batch.mask)

        def head(hidden: Tensor, *, packed: Packed, other: LogitFactors | None) -> tuple[Tensor, Tensor, MicroLoss]:
            numbers = self._head.numbers(hidden, packed=packed, other=other, temperature=term.temperature)
            samples = term.batch.select(packed.samples).to(self.device)
            loss, metrics = term.objective(self._head.named(numbers), samples, totals)
            micro = MicroLoss(
                term=number,
                samples=packed.samples,
                loss=loss.detach().clone(),
                metrics=metrics,
                outputs=numbers.detach(),
            )
            return loss, torch.ones((), dtype=torch.int), micro

        return self._micro_batches(term.batch, budget, head, term.against)

    def _micro_batches(
        self, batch: Rollouts, budget: Budget, head: Callable[..., Any], against: Against | None
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches, each with `head` on it and on the logit factors of its other policy."""
        work = list[MicroBatch]()
        everything = torch.arange(len(batch))
        for other, share in against.policies.shares(batch) if against else [(None, everything)]:
            divided = self._batching.divide(batch.select(share), budget)
            samples = [share[micro].tolist() for micro in divided]
            factors = [None] * len(samples)
            if against and other:
                factors = other._logit_factors(batch, samples, budget, against.divergence)
            rows = self._batching.pack(batch, samples)
            work += [(row, partial(head, packed=row, other=of_row)) for row, of_row in zip(rows, factors, strict=True)]
        return work

    def _logit_factors(
        self, batch: Rollouts, samples: list[list[int]], budget: Budget, divergence: Divergence
    ) -> list[Any]:
        """Return this policy's `LogitFactors` on each micro-batch; None before the last pipeline stage."""
        head = partial(self._head.logit_factors, divergence=divergence)
        work = [(row, partial(head, packed=row)) for row in self._batching.pack(batch, samples)]
        return self._read(work, budget) or [None] * len(work)

    def _outputs(self, batch: Rollouts, work: Sequence[MicroBatch], numbers: Sequence[Tensor], *, with_kl: bool) -> Any:
        """Bring the numbers of all micro-batches of `batch` to all ranks, as `infer` returns them. Collective."""
        num_outputs = self._head.num_outputs(with_kl=with_kl)
        whole = add_outputs(work, numbers, batch.mask, self.mesh, num_outputs=num_outputs, device=self.device)
        return self._head.named(whole)

    def _read(self, work: Sequence[MicroBatch], budget: Budget) -> list[Any]:
        """Run micro-batches forward only; return what their heads return, on the last pipeline stage."""
        for module in self.modules:
            module.eval()
        with torch.no_grad(), self.offload.parameters():
            return run_schedule(self.models, work, budget.row_length(self.mesh), forward_only=True)


def _summary(results: Sequence[dict[str, float] | NotFinite | None]) -> dict[str, float]:
    """Average the metrics of the steps that were taken; count the mini-batches that were skipped or empty (None)."""
    steps = [result for result in results if isinstance(result, dict)]
    means = {name: sum(step[name] for step in steps) / len(steps) for name in (steps[0] if steps else ())}
    skipped = sum(isinstance(result, NotFinite) for result in results)
    return means | {"skipped_updates": float(skipped), "empty_minibatches": float(results.count(None))}
