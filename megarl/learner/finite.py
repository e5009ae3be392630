"""What is known of a mini-batch whose loss or gradient is not finite, and what it must leave behind: nothing.

Invariant: whether a mini-batch is one of these follows from numbers of all ranks, so all of them say the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megarl.distributed.exchange import together

MOST_NAMED = 8  # parameters of one rank


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """Why an update was skipped; the same on every rank."""

    loss: float  # of the global mini-batch, the sum over all ranks
    grad_norm: float  # of the global gradient, before clipping
    rows: tuple[tuple[int, ...], ...]  # samples of each part that shared a micro-batch whose loss was not finite
    parameters: dict[int, tuple[str, ...]]  # rank -> the first of those whose gradient is not finite there

    def describe(self) -> str:
        """In words."""
        return f"loss {self.loss:g}, gradient norm {self.grad_norm:g}"


def explain_not_finite(
    modules: Sequence[Any],
    rows: Sequence[tuple[int, Sequence[int]]],
    *,
    num_terms: int,
    loss: float,
    grad_norm: float,
) -> NotFinite:
    """Collect from all ranks why a step is not taken, after its backward pass. Collective.

    Args:
        modules: the model's chunks on this rank.
        rows: of each micro-batch of this rank whose loss is not finite, the term of the loss and the term's samples.
        num_terms: terms of the step's loss.
        loss: of the global mini-batch.
        grad_norm: of the global gradient.
    """
    ranks = together(lambda: (rows, parameters_not_finite(modules)))
    by_term = [
        tuple(sorted({row for bad, _ in ranks for number, samples in bad if number == term for row in samples}))
        for term in range(num_terms)
    ]
    parameters = {rank: names for rank, (_, names) in enumerate(ranks) if names}
    return NotFinite(loss=loss, grad_norm=grad_norm, rows=tuple(by_term), parameters=parameters)


def parameters_not_finite(chunks: Sequence[Any]) -> tuple[str, ...]:
    """The first parameters of this rank whose gradient is not finite, after it was summed over ranks.

    A name begins with the number of its chunk where a virtual pipeline has several.
    """
    named = (
        (f"{number}." * (len(chunks) > 1) + name, getattr(parameter, "main_grad", None))
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    )
    names = (name for name, gradient in named if gradient is not None and not bool(gradient.isfinite().all()))
    return tuple(name for name, _ in zip(names, range(MOST_NAMED), strict=False))


class Buffers:
    """What a model computes with and no optimizer owns: the routers' biases, which a backward pass moves by itself."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]

    def restore(self) -> None:
        """As they were when this was made."""
        for buffer, kept in self._kept:
            buffer.copy_(kept)
