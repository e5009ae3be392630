"""One Megatron model and, if it learns, its optimizer: `infer` reads numbers off a batch, `update` learns from batches.

Invariant: every rank calls with the same batch and receives the same result. The learner itself spreads the samples
over data-parallel ranks and micro-batches. No split changes a result: objectives return contributions to the global
batch, and the learner only adds them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from megarl.batch import Rollouts
from megarl.learner.against import Against
from megarl.learner.batching import Batching, Budget
from megarl.learner.contributions import add_metrics, largest
from megarl.learner.experts import share_batch_size
from megarl.learner.finite import Buffers, NotFinite, Verdict, explain_not_finite
from megarl.learner.layout import source_layout, weights
from megarl.learner.offload import Offload
from megarl.learner.optimizer import Optimizer
from megarl.learner.outputs import OutputHead
from megarl.learner.overlap import weights_in_flight
from megarl.learner.parallel import Mesh
from megarl.learner.passes import Passes
from megarl.learner.patches.cpu import megatron_platform
from megarl.learner.schedule import MicroBatch, run_schedule
from megarl.learner.terms import LossTerm, MicroLoss, Objective, loss_of
from megarl.models.architecture import Architecture
from megarl.reshard.layout import Layout

LOSS = "*"  # the key of the loss among the metrics of a step; no metric has this name
OnMinibatch = Callable[[int, Sequence[LossTerm], NotFinite | None], None]  # its number; its loss; why it is skipped
Review = Callable[[Any], Rollouts | None]  # takes the outputs on a mini-batch, returns samples to learn from instead


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
        self._head = OutputHead(self.modules[-1], architecture, mesh, temperature=temperature)
        batching = Batching(mesh, self.modules[0].config, device, balance=balance)
        self.passes = Passes(models, self._head, batching, offload=offload, mesh=mesh, device=device)

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
        self,
        batch: Rollouts,
        budget: Budget,
        *,
        against: Against | None = None,
        with_entropy: bool = False,
        temperature: float | None = None,
    ) -> Any:
        """Compute log-probabilities, or values, of every response token; `temperature` replaces its own.

        Returns:
            For a policy, `PolicyOutputs` of [B, T] float32, with entropies if asked for, and with the exact divergence
            if there is one.
            For a value model, [B, T] float32 values; the value at a token is that of the state before the token. All
            are zero outside `batch.mask`, on the host, and equal on all ranks.
        """
        return self.passes.read(batch, budget, against, with_entropy=with_entropy, temperature=temperature)

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
        gradient is not finite is skipped on all ranks, and so is one whose gradient is exactly 0, which has nothing to
        teach: weights, optimizer and routers stay as they were before it.

        Args:
            against: the exact divergence that the objective receives.
            extra_terms: a second term of the loss of every mini-batch; may be endless.
            on_minibatch: called after each mini-batch that is not left out; may raise.
            review: called with the outputs on each mini-batch, as `infer` returns them with entropies, before the step;
                may raise, and nothing is learned then. If it returns other samples, the step is taken on them, without
                a review.

        Returns:
            The mean of each metric and of `grad_norm` (before clipping) over the mini-batches with a finite gradient,
            if any, and always `skipped_updates`, `empty_minibatches`, `idle_minibatches` (gradient 0) and `lr`.
        """
        assert self.optimizer is not None, "this model does not learn"
        self.optimizer.advance_schedule()
        extras = repeat(()) if extra_terms is None else ((term,) for term in extra_terms)
        results = list[dict[str, float] | NotFinite | None]()
        with self.offload.everything(), weights_in_flight(self.models):
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
        work = list[MicroBatch]()
        for number, term in enumerate(terms):
            bind = loss_of(number, term, self._head, self.device, with_entropy=term.needs_entropy or bool(review))
            work += self.passes.divide(term.batch, budget, bind, term.against)
        self.offload.fetch_optimizer()  # after the micro-batches, which would queue behind it
        for model in self.models:
            model.train()
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        share_batch_size(self.modules, sum(int((term.batch.lengths() - 1).sum()) for term in terms))
        buffers = Buffers(self.modules)
        losses: list[MicroLoss] = run_schedule(self.models, work, budget.row_length(self.mesh), forward_only=False)
        if review:
            term, numbers = terms[0], [micro.outputs for micro in losses if micro.term == 0]
            of_term, with_kl = work[: len(numbers)], term.against is not None
            try:
                outputs = self.passes.everywhere(term.batch, of_term, numbers, with_entropy=True, with_kl=with_kl)
                others = review(outputs)
            except BaseException:
                buffers.restore()
                raise
            if others is not None:
                buffers.restore()
                return self._step((replace(term, batch=others), *terms[1:]), budget)
        metrics = add_metrics([micro.metrics | {LOSS: micro.loss} for micro in losses], self.mesh, self.device)
        loss = metrics.pop(LOSS)
        self.offload.await_optimizer()
        with megatron_platform():
            grad_norm = self.optimizer.grad_norm()
        verdict = Verdict(largest(Verdict.of(loss, grad_norm), self.device))
        if verdict is not Verdict.LEARN:
            buffers.restore()
        if verdict is Verdict.NOT_FINITE:
            bad = [(micro.term, micro.samples.tolist()) for micro in losses if not bool(micro.loss.isfinite())]
            reason = explain_not_finite(self.modules, bad, num_terms=len(terms), loss=loss, grad_norm=grad_norm)
            return terms, reason
        if verdict is Verdict.LEARN:  # from a gradient of 0, momentum and weight decay would move the weights
            with megatron_platform():
                self.optimizer.step(grad_norm)
        return terms, metrics | {"grad_norm": grad_norm}


def _summary(results: Sequence[dict[str, float] | NotFinite | None]) -> dict[str, float]:
    """Average the metrics of finite mini-batches; count those that were skipped, empty (None) or idle (gradient 0)."""
    steps = [result for result in results if isinstance(result, dict)]
    means = {name: sum(step[name] for step in steps) / len(steps) for name in (steps[0] if steps else ())}
    skipped = sum(isinstance(result, NotFinite) for result in results)
    counts = {
        "skipped_updates": skipped,
        "empty_minibatches": results.count(None),
        "idle_minibatches": sum(step["grad_norm"] == 0.0 for step in steps),
    }
    return means | {name: float(count) for name, count in counts.items()}
