"""The permanent memory of a model on one rank of the trainer: weights, gradients and optimizer state.

These are the sizes that `learner/optimizer.py` and Megatron-Core allocate, element for element: a test builds real
learners and compares.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.columns import Integers
from megarl.distributed.pieces import Pieces
from megarl.learner.config import MegatronSection
from megarl.models.flops import EXPERT
from megarl.models.grid import Grid
from megarl.models.trainer import ROUTER_BIAS
from megarl.reshard.headers import Shape
from megarl.reshard.layout import Placement

Shapes = Mapping[str, Shape]

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
FLOAT32 = 4
MOMENTS = 2 * FLOAT32  # Adam's two, per weight
PARAM_ALIGNMENT, BUFFER_ALIGNMENT = 64, 128  # elements; Megatron-Core's `_ParamAndGradBuffer`


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of one model on one rank."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    frozen: int = 0  # of `weights`, all but the adapters


def optimizer_bytes(section: MegatronSection) -> int:
    """Return the bytes of optimizer state per weight: Adam's moments, and of bfloat16 weights a float32 copy."""
    return MOMENTS if section.dtype == "float32" else MOMENTS + FLOAT32


def frozen_states(chunks: Sequence[Shapes], section: MegatronSection) -> States:
    """Return the states of a model that does not learn; `chunks` are the parameters of the rank's model chunks."""
    numel = sum(math.prod(shape) for chunk in chunks for shape in chunk.values())
    return States(weights=numel * DTYPE_BYTES[section.dtype])


def trained_states(chunks: Sequence[Shapes], section: MegatronSection, grid: Grid) -> States:
    """Return the states of a model with an optimizer, on a rank with a full data-parallel shard.

    Gradients are float32 and so are Adam's moments; in bfloat16 the optimizer has a float32 copy of the weights too, in
    float32 it works on the weights themselves. The distributed optimizer keeps weights and gradients in flat buffers,
    padded so that they divide by the data-parallel ranks, and a rank has the optimizer state of its part alone.
    Experts have buffers of their own, shared by the ranks that hold the same experts.
    """
    total = 0
    shard = 0
    for chunk in chunks:
        for shapes, num_ranks in _buffers(chunk, grid):
            if section.use_distributed_optimizer:
                numel = _padded(shapes, num_ranks)
                shard += numel // num_ranks
            else:
                numel = sum(map(math.prod, shapes))
                shard += numel
            total += numel
    return States(
        weights=total * DTYPE_BYTES[section.dtype],
        gradients=total * FLOAT32,
        optimizer=shard * optimizer_bytes(section),
    )


def adapted_states(
    frozen: Sequence[Shapes], learning: Sequence[Shapes], section: MegatronSection, grid: Grid
) -> States:
    """Return the states of a model whose parameters `learning` alone have an optimizer, on a rank."""
    base = frozen_states(frozen, section).weights
    states = trained_states(learning, section, grid)
    return replace(states, weights=base + states.weights, frozen=base)


def copied_bytes(chunks: Sequence[Shapes], section: MegatronSection, grid: Grid) -> int:
    """Return about the most bytes of host memory that an asynchronous save of a model needs on a rank.

    `chunks` are the parameters that learn: a checkpoint has no others.
    Data-parallel ranks copy whole weights, each about as much, and the optimizer likewise if it is not distributed.
    Each rank copies its shard of a distributed optimizer, and completes the parameters whose largest piece it has.
    """
    total = 0
    of_whole = DTYPE_BYTES[section.dtype]
    if not section.use_distributed_optimizer:
        of_whole += optimizer_bytes(section)
    for chunk in chunks:
        for shapes, num_ranks in _buffers(chunk, grid):
            sizes = [*map(math.prod, shapes)]
            total += max(max(sizes), math.ceil(sum(sizes) / num_ranks)) * of_whole
            if section.use_distributed_optimizer:
                total += _most_copied(shapes, num_ranks) * (MOMENTS + FLOAT32)
    return total


def _most_copied(shapes: Sequence[Shape], num_ranks: int) -> int:
    """Return the elements of a buffer that the busiest rank copies for a save."""
    shard = _padded(shapes, num_ranks) // num_ranks
    copied = Counter[int]()
    for start, end in _places(shapes):
        pieces = Pieces.cut(start, end, shard=shard)
        for rank in pieces.on_ranks:
            copied[rank] += pieces.copied_by(rank)
    return max(copied.values())


def held_bytes(placement: Placement, num_ranks: int) -> Integers:
    """Return `[num_ranks]` int64: the bytes of a model on each rank."""
    held = np.zeros(num_ranks, dtype=np.int64)
    for boxes, num_params in Counter(placement.values()).items():
        for place in boxes.places:
            held[list(place.ranks)] += place.box.numel * boxes.dtype.itemsize * num_params
    return held


def _buffers(chunk: Shapes, grid: Grid) -> list[tuple[list[Shape], int]]:
    """Return the shapes of each buffer, and the number of ranks that add their gradients in it.

    The router's bias, a few hundred numbers that no gradient changes, is in none of them.
    """
    dense = [shape for name, shape in chunk.items() if EXPERT not in name and not name.endswith(ROUTER_BIAS)]
    experts = [shape for name, shape in chunk.items() if EXPERT in name]
    buffers = [(dense, grid.dp * grid.cp), (experts, grid.num_ranks // (grid.etp * grid.ep * grid.pp))]
    return [(shapes, num_ranks) for shapes, num_ranks in buffers if shapes]


def _places(shapes: Sequence[Shape]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each parameter in a buffer; Megatron stores parameters in reverse order."""
    end = 0
    for shape in reversed(shapes):
        start = _round_up(end, PARAM_ALIGNMENT)
        end = start + math.prod(shape)
        yield start, end


def _padded(shapes: Sequence[Shape], num_ranks: int) -> int:
    """Return the elements of a buffer of the distributed optimizer."""
    *_, (_, end) = _places(shapes)
    return _round_up(end, math.lcm(num_ranks, BUFFER_ALIGNMENT))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
