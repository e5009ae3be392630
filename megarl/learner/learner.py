"""One Megatron model and, if it learns, its optimizer: `infer` reads numbers off a batch, `update` takes a step on one.

Invariant: every rank calls with the same batch and receives the same answer. The learner spreads the samples over
data-parallel ranks and micro-batches by itself, and no split changes a result: objectives return contributions to the
global batch, which are only ever added.

A policy can measure itself `against` another one of the same tokens and mesh: that one first reads the same
micro-batches on the same ranks, and its hidden states wait in host memory until the policy is there. They are what the
exact divergence needs, a few thousand numbers per response token, and no rank sends any of them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from megarl.algorithms.losses import PolicyOutputs, Totals
from megarl.batch import Rollouts
from megarl.distributed.exchange import together
from megarl.learner.experts import share_batch_size
from megarl.learner.finite import Buffers, NotFinite, parameters_not_finite
from megarl.learner.heads import vocab_parallel_kl, vocab_parallel_log_probs
from megarl.learner.layout import source_layout, weights
from megarl.learner.offload import Offload
from megarl.learner.optimizer import Optimizer
from megarl.learner.packed import Packed, pack_samples
from megarl.learner.packing import pack, partition
from megarl.learner.parallel import Mesh
from megarl.learner.schedule import Micro, num_micro_batches, run_schedule
from megarl.models.architecture import Architecture
from megarl.platform.cpu import megatron_platform
from megarl.reshard.layout import Layout

Objective = Callable[[Any, Any, Totals], tuple[Tensor, dict[str, Tensor]]]
LOSS = "*"  # travels among the metrics of a step, and is no name of any


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much one forward pass takes."""

    max_tokens: int  # of all sequences together, on one rank of those that share them
    max_sequences: int | None  # None: only the tokens bound it
    num_together: int = 1  # neighbouring samples that a loss compares: they share a micro-batch, in their order


@dataclass(frozen=True, kw_only=True)
class Part:
    """Samples that one optimizer step learns from, and what of them."""

    batch: Rollouts
    objective: Objective
    against: "Learner | None" = None  # the objective is told the exact divergence from it
    temperature: float | None = None  # of the probabilities that the objective is told; None: the learner's


Outcome = Callable[[int, Sequence[Part], NotFinite | None], None]  # which mini-batch, of what; why it was skipped


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What the head of a micro-batch says of it in an update."""

    part: int  # of the step's parts
    samples: Tensor  # [b] int64, rows of the part
    loss: Tensor  # scalar, without its graph
    metrics: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the exact divergence from a policy needs of it on one micro-batch."""

    hidden: Tensor  # [R, hidden_size] final hidden states of the places that predict a response token; on the host
    weight: Tensor  # [rows, hidden_size] this rank's slice of its output embedding; on the device


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A sharded policy or value model."""

    models: tuple[Any, ...]  # GPTModel, or Megatron's DistributedDataParallel around it where there is an optimizer
    optimizer: Optimizer | None  # None: the model only answers
    offload: Offload
    mesh: Mesh
    architecture: Architecture
    temperature: float  # of the sampler whose log-probabilities a policy reports
    device: torch.device
    balance: bool = True  # spread samples by length; otherwise only by number

    def infer(self, batch: Rollouts, budget: Budget, *, against: "Learner | None" = None) -> Any:
        """Log-probabilities and entropies, or values, of every response token.

        Returns:
            `PolicyOutputs` of [B, T] float32 for a policy, with the exact divergence where there is a policy `against`
            which to take it; [B, T] float32 values for a value model, where the value at a token is that of the state
            before it. Zero where `batch.mask` is False; on the host, equal on all ranks.
        """
        micro_batches = self._micro_batches(batch, budget)
        readings = self._readings(against, batch, micro_batches, budget)
        micros = self._packed(batch, micro_batches)
        heads = [
            partial(self._outputs, packed=packed, other=other) for packed, other in zip(micros, readings, strict=True)
        ]
        for module in self.modules:
            module.eval()
        with torch.no_grad(), self.offload.parameters():
            outputs = self._run(list(zip(micros, heads, strict=True)), budget, forward_only=True)
        names = ["log_probs", "entropy", *(["kl"] if against else [])] if self.is_policy else ["values"]
        found = torch.zeros(len(names), *batch.mask.shape, device=self.device)
        if self.mesh.speaks_for_its_samples:
            for packed, output in zip(micros, outputs, strict=True):
                parts = [getattr(output, name) for name in names] if self.is_policy else [output]
                found[:, packed.samples.to(self.device)] = torch.stack(parts)
        flat = found[:, batch.mask.to(self.device)]
        dist.all_reduce(flat)  # exactly one rank contributes each number
        rows = [torch.zeros(batch.mask.shape).masked_scatter(batch.mask, row) for row in flat.cpu()]
        return PolicyOutputs(**dict(zip(names, rows, strict=True))) if self.is_policy else rows[0]

    def update(
        self,
        minibatches: Iterable[Rollouts],
        objective: Objective,
        budget: Budget,
        *,
        against: "Learner | None" = None,
        beside: Iterable[Part] | None = None,
        outcome: Outcome | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step on each global mini-batch; one call is one step of the learning-rate schedule.

        The objective of a policy is told the exact divergence from the policy `against` which it is taken, if any.
        `beside` has another part for every mini-batch, whose loss is added to that of the mini-batch in the same step.
        A mini-batch whose loss or gradient is not finite is skipped on all ranks: weights, optimizer and routers are
        as if it had not been there. `outcome` is told of each mini-batch before the next one, and may raise. A
        mini-batch without a response token teaches nothing: no step is taken on it, nor on what is beside it.

        Returns:
            The mean of each metric over the mini-batches that were learnt from, with `grad_norm` (before clipping);
            and, which is all where there were none, `skipped_updates`, `empty_minibatches` and `lr`.
        """
        assert self.optimizer is not None, "this model does not learn"
        self.optimizer.advance_schedule()
        others = repeat(()) if beside is None else ((part,) for part in beside)
        steps, skipped, empty = list[dict[str, float]](), 0, 0
        with self.offload.everything():
            for number, (minibatch, more) in enumerate(zip(minibatches, others, strict=False)):  # `beside`: endless
                if not minibatch.mask.any():
                    empty += 1
                    continue
                parts = (Part(batch=minibatch, objective=objective, against=against), *more)
                found = self._step(parts, budget)
                if isinstance(found, NotFinite):
                    skipped += 1
                else:
                    steps.append(found)
                if outcome:
                    outcome(number, parts, found if isinstance(found, NotFinite) else None)
        means = {name: sum(step[name] for step in steps) / len(steps) for name in (steps[0] if steps else ())}
        return means | {
            "skipped_updates": float(skipped),
            "empty_minibatches": float(empty),
            "lr": self.optimizer.lr,
        }

    def _step(self, parts: Sequence[Part], budget: Budget) -> dict[str, float] | NotFinite:
        """The metrics of a step, or why it was not taken."""
        assert self.optimizer is not None
        micros = [micro for number, part in enumerate(parts) for micro in self._lessons(number, part, budget)]
        for model in self.models:
            model.train()
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        share_batch_size(self.modules, sum(int((part.batch.lengths() - 1).sum()) for part in parts))
        buffers = Buffers(self.modules)
        lessons: list[Lesson] = self._run(micros, budget, forward_only=False)
        metrics = self._sum([lesson.metrics | {LOSS: lesson.loss} for lesson in lessons])
        loss = metrics.pop(LOSS)
        with megatron_platform():
            grad_norm = self.optimizer.grad_norm()
        if self._any_rank(not (math.isfinite(loss) and math.isfinite(grad_norm))):
            buffers.restore()
            return self._not_finite(len(parts), lessons, loss=loss, grad_norm=grad_norm)
        with megatron_platform():
            self.optimizer.step()
        return metrics | {"grad_norm": grad_norm}

    def _any_rank(self, here: bool) -> bool:
        """Whether it is so on any rank: what ranks decide alike, they must not read off numbers of their own."""
        found = torch.tensor(float(here), device=self.device)
        dist.all_reduce(found)
        return bool(found)

    def _not_finite(self, num_parts: int, lessons: Sequence[Lesson], *, loss: float, grad_norm: float) -> NotFinite:
        """What can be said of a mini-batch that must not be learnt from, after its backward pass."""
        spoilt = [lesson for lesson in lessons if not bool(lesson.loss.isfinite())]
        mine = [(lesson.part, lesson.samples.tolist()) for lesson in spoilt]
        ranks = together(lambda: (mine, parameters_not_finite(self.modules)))
        rows = [
            tuple(sorted({row for found, _ in ranks for number, samples in found if number == part for row in samples}))
            for part in range(num_parts)
        ]
        parameters = {rank: names for rank, (_, names) in enumerate(ranks) if names}
        return NotFinite(loss=loss, grad_norm=grad_norm, rows=tuple(rows), parameters=parameters)

    def _lessons(self, number: int, part: Part, budget: Budget) -> list[Micro]:
        """The micro-batches of a part, with heads that give the loss."""
        micro_batches = self._micro_batches(part.batch, budget)
        readings = self._readings(part.against, part.batch, micro_batches, budget)
        totals = Totals.of(part.batch.mask)

        def loss(hidden: Tensor, *, packed: Packed, other: Reading | None) -> tuple[Tensor, Tensor, Lesson]:
            outputs = self._outputs(hidden, packed=packed, other=other, temperature=part.temperature)
            micro = part.batch.select(packed.samples).to(self.device)
            value, metrics = part.objective(outputs, micro, totals)
            lesson = Lesson(part=number, samples=packed.samples, loss=value.detach().clone(), metrics=metrics)
            return value, torch.ones((), dtype=torch.int), lesson

        return [
            (packed, partial(loss, packed=packed, other=other))
            for packed, other in zip(self._packed(part.batch, micro_batches), readings, strict=True)
        ]

    @property
    def is_policy(self) -> bool:
        """Whether it answers with log-probabilities, and not with values."""
        return not self.architecture.scalar_head

    @property
    def modules(self) -> tuple[Any, ...]:
        """The GPTModel itself: its chunks, more than one in a virtual pipeline."""
        return tuple(model.module for model in self.models) if self.optimizer else self.models

    def layout(self) -> Layout:
        """Which boxes of the Hugging Face parameters this rank holds."""
        return source_layout(self.modules, self.architecture, self.mesh)

    @contextmanager
    def weights(self) -> Iterator[dict[str, Tensor]]:
        """The local parameters by name, on the device for the time of the block."""
        with self.offload.parameters():
            yield weights(self.modules)

    def _run(self, micros: Sequence[Micro], budget: Budget, *, forward_only: bool) -> list[Any]:
        """What the heads of the micro-batches said on the last stage."""
        max_tokens = budget.max_tokens * self.mesh.cp_size
        return run_schedule(self.models, micros, max_tokens=max_tokens, forward_only=forward_only)

    def _micro_batches(self, batch: Rollouts, budget: Budget) -> list[list[int]]:
        """This rank's samples in micro-batches; as many on every data-parallel rank, because experts may span them."""
        lengths, size = batch.lengths().tolist(), budget.num_together
        units = [range(first, min(first + size, len(lengths))) for first in range(0, len(lengths), size)]
        tokens = [sum(lengths[sample] for sample in unit) for unit in units]
        costs = tokens if self.balance else [1] * len(units)
        groups = [int(batch.groups[unit[0]]) for unit in units]
        shares = partition(costs, groups, self.mesh.dp_size)
        most_units = budget.max_sequences and max(1, budget.max_sequences // size)
        packed = partial(pack, max_tokens=budget.max_tokens * self.mesh.cp_size, max_sequences=most_units)
        most = max(len(packed([tokens[unit] for unit in share])) for share in shares)
        mine = shares[self.mesh.dp_rank]
        bins = packed([tokens[unit] for unit in mine], num_bins=num_micro_batches(most, self.mesh))
        return [[sample for place in places for sample in units[mine[place]]] for places in bins]

    def _packed(self, batch: Rollouts, micro_batches: Iterable[Sequence[int]]) -> list[Packed]:
        """The micro-batches as this model's layers take them."""
        mesh = self.mesh
        num_parts = mesh.tp_size if self.modules[0].config.sequence_parallel else 1
        packed = partial(
            pack_samples, batch, device=self.device, num_parts=num_parts, cp_rank=mesh.cp_rank, cp_size=mesh.cp_size
        )
        return [packed(samples) for samples in micro_batches]

    @staticmethod
    def _readings(
        other: "Learner | None", batch: Rollouts, micro_batches: list[list[int]], budget: Budget
    ) -> list[Reading | None]:
        """What `other` reads of each micro-batch; None where there is none, and before the last stage."""
        if other is None:
            return [None] * len(micro_batches)
        micros = other._packed(batch, micro_batches)
        for module in other.modules:
            module.eval()
        with torch.no_grad(), other.offload.parameters():
            heads = [partial(other._reading, packed=packed) for packed in micros]
            readings = other._run(list(zip(micros, heads, strict=True)), budget, forward_only=True)
        return readings or [None] * len(micro_batches)

    def _reading(self, hidden: Tensor, *, packed: Packed) -> Reading:
        # The weight is the storage itself: it stays on the device when the others are offloaded.
        return Reading(hidden=self._states(hidden, packed).cpu(), weight=self._output_weight().detach())

    def _states(self, hidden: Tensor, packed: Packed) -> Tensor:
        """[R, hidden_size] states of the places that predict a response token, equal on all tensor-parallel ranks."""
        states = hidden[0]
        if self.modules[-1].config.sequence_parallel:
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=self.is_policy)
        elif self.is_policy:
            states = copy_to_tensor_model_parallel_region(states)
        return states[packed.predictors]

    def _output_weight(self) -> Tensor:
        """[rows, hidden_size] this rank's slice of a policy's output embedding, or the weight of a value head."""
        module = self.modules[-1]
        tied = self.is_policy and module.share_embeddings_and_output_weights
        weight: Tensor = module.shared_embedding_or_output_weight() if tied else module.output_layer.weight
        return weight

    def _outputs(
        self, hidden: Tensor, *, packed: Packed, other: Reading | None, temperature: float | None = None
    ) -> PolicyOutputs | Tensor:
        """[b, T] numbers of a micro-batch, equal on the ranks that share it, from [1, N, hidden_size] hidden states."""
        states, weight = self._states(hidden, packed), self._output_weight()
        if not self.is_policy:
            values = torch.nn.functional.linear(states.float(), weight.float())[:, 0]
            return self._whole(packed.unpack(values))
        softmax: dict[str, Any] = {
            "temperature": temperature or self.temperature,
            "vocab_size": self.architecture.vocab_size,
            "group": self.mesh.tp_group,
        }
        numbers = [*vocab_parallel_log_probs(states, weight, packed.targets, **softmax)]
        if other:
            numbers.append(vocab_parallel_kl(states, weight, other.hidden.to(self.device), other.weight, **softmax))
        whole = self._whole(torch.stack([packed.unpack(number) for number in numbers]))
        return PolicyOutputs(log_probs=whole[0], entropy=whole[1], kl=whole[2] if other else None)

    def _whole(self, parts: Tensor) -> Tensor:
        """The sum over the ranks that share the sequences; each goes on with the gradient of its own part alone."""
        if self.mesh.cp_size == 1:
            return parts
        whole: Tensor = reduce_from_tensor_model_parallel_region(parts, group=self.mesh.cp_group)
        return whole

    def _sum(self, contributions: list[dict[str, Tensor]]) -> dict[str, float]:
        """The contributions of all micro-batches of all ranks, added; equal on all ranks."""
        names = [sorted({name for metrics in contributions for name in metrics})]
        last_rank = dist.get_world_size() - 1  # of the last pipeline stage, which alone knows the names
        dist.broadcast_object_list(names, src=last_rank)
        total = torch.zeros(len(names[0]), dtype=torch.float64, device=self.device)
        none = torch.zeros((), device=self.device)  # a part has metrics of its own
        for metrics in contributions if self.mesh.speaks_for_its_samples else []:
            total += torch.stack([metrics.get(name, none).double() for name in names[0]])
        dist.all_reduce(total)
        return dict(zip(names[0], total.tolist(), strict=True))
