"""Mini-batches without a finite, non-zero gradient: their status, their description, and the removal of their traces.

Invariant: numbers of all ranks decide whether a mini-batch is finite, so all ranks decide alike.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import nn

from megarl.distributed.exchange import together

MOST_NAMED = 8  # parameters of one rank


class GradientStatus(IntEnum):
    """The state of the gradient of a mini-batch; the largest status of a rank holds for all ranks."""

    IDLE = 0  # the gradient is exactly 0: there is nothing to learn
    LEARN = 1
    NOT_FINITE = 2

    @classmethod
    def of(cls, loss: float, grad_norm: float) -> "GradientStatus":
        """Return the status on this rank of a gradient with this norm, of this loss."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return cls.NOT_FINITE
        return cls.LEARN if grad_norm else cls.IDLE


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """The reason why an optimizer step was not taken; the same on every rank."""

    loss: float  # of the global mini-batch, the sum over all ranks
    grad_norm: float  # of the global gradient, before clipping
    rows: tuple[
        tuple[int, ...], ...
    ]  # of each term of the loss: samples in micro-batches with a loss that is not finite
    parameters: dict[int, tuple[str, ...]]  # rank -> the first parameters whose gradient is not finite there

    def describe(self) -> str:
        """Return loss and gradient norm in words."""
        return f"loss {self.loss:g}, gradient norm {self.grad_norm:g}"


def explain_not_finite(
    modules: Sequence[nn.Module],
    rows: Sequence[tuple[int, Sequence[int]]],
    *,
    num_terms: int,
    loss: float,
    grad_norm: float,
) -> NotFinite:
    """Explain on all ranks why a step is not taken, after its backward pass. Collective.

    Args:
        modules: the model's chunks on this rank.
        rows: for each micro-batch of this rank whose loss is not finite, the number of its term and its samples.
        num_terms: terms of the step's loss.
        loss: of the global mini-batch.
        grad_norm: of the global gradient.
    """
    ranks = together(lambda: (rows, parameters_not_finite(modules)))
    by_term = [set[int]() for _ in range(num_terms)]
    for bad, _ in ranks:
        for number, samples in bad:
            by_term[number].update(samples)
    parameters = {rank: names for rank, (_, names) in enumerate(ranks) if names}
    found = tuple(tuple(sorted(samples)) for samples in by_term)
    return NotFinite(loss=loss, grad_norm=grad_norm, rows=found, parameters=parameters)


def parameters_not_finite(chunks: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the first parameters of this rank whose gradient is not finite after the sum over ranks.

    In a virtual pipeline, a name begins with the number of its chunk.
    """
    named = (
        (f"{number}." * (len(chunks) > 1) + name, getattr(parameter, "main_grad", None))
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    )
    names = (name for name, gradient in named if gradient is not None and not bool(gradient.isfinite().all()))
    return tuple(name for name, _ in zip(names, range(MOST_NAMED), strict=False))


class Buffers:
    """A copy of the model's buffers: a backward pass changes the routers' biases, which no optimizer owns."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]

    def restore(self) -> None:
        """Set the buffers back to the copy."""
        for buffer, kept in self._kept:
            buffer.copy_(kept)
