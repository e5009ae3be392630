"""The device memory that the dropout before adapters takes in an update."""

import re
from collections import defaultdict
from collections.abc import Iterator

from megarl.models.grid import Grid
from megarl.planning.activations import chunks_in_flight
from megarl.planning.states import DTYPE_BYTES, Shapes
from megarl.planning.workload import TrainerModel

MASK_BYTES = 1
"""Bytes of a number that may be dropped in the mask, which stays for the backward pass, as the numbers that are left
do."""
HASH_BYTES = 4 * 4
"""Bytes of such a number while hashes decide: four tensors of integers at a time."""
PLACE = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<linear>.+)\.adapter\.lora_a")
"""Names of adapters outside of experts, whose adapters have no dropout."""
CUT_BY_COLUMNS = ("linear_proj", "linear_fc2", "out_proj")
"""Linear layers with a part of the columns on each rank, and so with all tokens under sequence parallelism too."""


def dropout_bytes(model: TrainerModel, grid: Grid, *, stage: int, rank: int) -> int:
    """Return the most bytes of dropout on a rank of a pipeline stage; 0 without dropout.

    Each linear layer with an adapter keeps a mask and the numbers that are left, of its complete input. A layer that is
    computed again keeps them during its own backward pass alone.
    """
    work = model.updates
    if work is None or model.lora is None or not model.lora.dropout:
        return 0
    of_number = MASK_BYTES + DTYPE_BYTES[model.section.dtype]
    kept = working = widest = 0
    for shapes in model.learning_shapes(grid, rank):
        for parts in _inputs(shapes, tp=grid.tp if model.section.sequence_parallel else 1):
            everything = sum(parts.values())
            feed_forward = sum(parts[name] for name in parts if name.startswith("mlp."))
            stays = {True: 0, "selective": everything - feed_forward, False: everything}[work.recompute]
            kept += stays
            working = max(working, everything - stays)
            widest = max(widest, *parts.values())
    in_flight = chunks_in_flight(grid, stage=stage, num_micro_batches=work.num_micro_batches) / grid.vpp
    return int(work.num_tokens * ((kept * in_flight + working) * of_number + widest * HASH_BYTES))


def _inputs(shapes: Shapes, *, tp: int) -> Iterator[dict[str, int]]:
    """Yield the numbers per token before each adapter of a layer, by name; `tp` ranks share the tokens."""
    layers = defaultdict[str, dict[str, int]](dict)
    for name, shape in shapes.items():
        place = PLACE.fullmatch(name)
        if place:
            is_cut = place["linear"].endswith(CUT_BY_COLUMNS)
            layers[place["layer"]][place["linear"]] = shape[-1] if is_cut else shape[-1] // tp
    yield from layers.values()
