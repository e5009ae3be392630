"""The experts of a rank computed together, for machines without Transformer Engine.

Megatron-Core then calls one module for each expert in turn. If each expert has few tokens, these calls and their nodes
of autograd cost the host more than the arithmetic. Here two functions multiply the tokens of all experts by their
matrices, and everything between is done once for all tokens.

The modules and their parameters stay: their names and shapes, checkpoints and synchronization do not change.
"""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megarl.learner.context import Context
from megarl.learner.weight_gradient import WeightGradient


class ProductByExpert(torch.autograd.Function):
    """`hidden @ weight.T`, with the weight of each row's expert. Rows of an expert are neighbours."""

    @staticmethod
    def forward(ctx: Context[Sequence[int]], hidden: Tensor, counts: Sequence[int], *weights: Tensor) -> Tensor:
        """Multiply [N, columns] states, the first `counts[0]` of them by the first of the [rows, columns] weights."""
        ctx.save_for_backward(hidden, *weights)
        ctx.settings = counts
        out = hidden.new_empty(len(hidden), len(weights[0]))
        for x, weight, y in zip(hidden.split(counts), weights, out.split(counts), strict=True):
            torch.mm(x, weight.t(), out=y)
        return out

    @staticmethod
    def backward(ctx: Context[Sequence[int]], grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the states and, as far as they are not yet added, of the weights."""
        hidden, *weights = ctx.saved_tensors
        of_hidden = None
        of_weights = list[Tensor | None]([None] * len(weights))
        by_expert = grad_out.split(ctx.settings)
        if ctx.needs_input_grad[0]:
            of_hidden = torch.empty_like(hidden)
            for gradient, weight, to in zip(by_expert, weights, of_hidden.split(ctx.settings), strict=True):
                torch.mm(gradient, weight, out=to)
        if any(ctx.needs_input_grad[2:]):
            of_weights = list(map(_of_weight, weights, by_expert, hidden.split(ctx.settings)))
        return of_hidden, None, *of_weights


def _of_weight(weight: Tensor, grad_out: Tensor, hidden: Tensor) -> Tensor | None:
    """Return what autograd has to add to the gradient of an expert's weight."""
    total = WeightGradient(weight)
    if len(hidden):
        total.add(grad_out, hidden)
    return total.to_return()


class Addition(Protocol):
    """The sum of the adapters of one projection of all experts, and its output."""

    def added(self, out: Tensor, hidden: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the [N, rows] output for [N, columns] states, with the addition."""
        ...


class Projection(torch.nn.Module):
    """One of the two projections of all experts, for rows that are sorted by expert."""

    def __init__(
        self,
        linears: Sequence[ColumnParallelLinear | RowParallelLinear],
        counts: Sequence[int],
        adapter: Addition | None,
        *,
        bias_scale: Tensor | None = None,
        in_turn: bool = False,
    ) -> None:
        """Take the experts' linear layers; a call of one returns its weight.

        Args:
            linears: the layers.
            counts: the number of rows of each expert.
            adapter: computes what the experts' adapters add, if they have any.
            bias_scale: [N], multiplies the biases; None: one.
            in_turn: the outputs are those of gate and up in turn.
        """
        super().__init__()
        self._linears = tuple(linears)
        self._counts = counts
        self._adapter = adapter
        self._bias_scale = bias_scale
        self._in_turn = in_turn

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Project [N, columns] states to [N, rows], biases included."""
        out: Tensor = ProductByExpert.apply(hidden, self._counts, *(linear() for linear in self._linears))
        if self._adapter is not None:
            out = self._adapter.added(out, hidden, self._counts)
        biases = [linear.bias for linear in self._linears if linear.bias is not None]
        if biases:
            of_rows = torch.stack(biases).repeat_interleave(torch.tensor(self._counts, device=out.device), dim=0)
            out = out + (of_rows if self._bias_scale is None else (of_rows * self._bias_scale[:, None]).to(out.dtype))
        return in_halves(out) if self._in_turn else out, None


def in_halves(states: Tensor) -> Tensor:
    """Return [N, size] states, first those at even places, then those at odd places."""
    return states.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class ExpertsTogether(SequentialMLP):
    """Megatron's experts, one module each, computed by functions of all their weights."""

    gate_and_up_in_turn = False  # the order of the rows of first projections

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.adapters = torch.nn.ModuleDict()  # by projection
        for linear in (linear for expert in self.local_experts for linear in (expert.linear_fc1, expert.linear_fc2)):
            # The modules are still called: Megatron hooks the calls to await weights that other ranks send.
            linear.forward = partial(getattr, linear, "weight")

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probabilities: Tensor) -> tuple[Tensor, None]:
        """Apply to each of [N, hidden_size] states its expert and its probability [N].

        Megatron computes a rank's only expert so; here the projections are those of all experts.
        """
        counts = tokens_per_expert.tolist()  # Megatron's dispatcher has brought them to the host
        additions: dict[str, Any] = dict(self.adapters.items())
        linears = {
            name: [getattr(expert, name) for expert in self.local_experts] for name in ("linear_fc1", "linear_fc2")
        }
        first = Projection(linears["linear_fc1"], counts, additions.get("linear_fc1"), in_turn=self.gate_and_up_in_turn)
        second = Projection(linears["linear_fc2"], counts, additions.get("linear_fc2"), bias_scale=probabilities)
        activation = self.local_experts[0].activation_func
        whole = SimpleNamespace(config=self.config, activation_func=activation, linear_fc1=first, linear_fc2=second)
        alone = SimpleNamespace(config=self.config, num_local_experts=1, local_experts=[partial(MLP.forward, whole)])
        out: tuple[Tensor, None] = SequentialMLP.forward(alone, hidden, tokens_per_expert, probabilities)
        return out


def compute_together(submodules: SimpleNamespace) -> None:
    """Put `ExpertsTogether` into the submodules of a mixture of experts, in the place of Megatron's `SequentialMLP`."""
    experts = submodules.experts
    # A ModuleSpec in megatron-core 0.16, a partial of the module in 0.19.
    if isinstance(experts, partial):
        submodules.experts = partial(ExpertsTogether, *experts.args, **experts.keywords)
    else:
        submodules.experts = ModuleSpec(module=ExpertsTogether, submodules=experts.submodules)
