"""The experts that the routers of a model chose in a forward pass, brought back from micro-batches to samples."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Rollouts
from megarl.columns import cut, spans
from megarl.learner.packed import places_of
from megarl.learner.parallel import Mesh
from megarl.learner.schedule import MicroBatch
from megarl.platform.device import to_device


def join_choices(share: Rollouts, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> Tensor:
    """Return the routes of this rank's layers, of all samples of a share: [M, L, k] int64, on the host.

    Collective among context-parallel ranks. `micro_batches` have the choices of all chunks, and all samples once.
    """
    counts = share.num_places()
    rows = list[Tensor]()
    for micro_batch in micro_batches:
        samples = micro_batch.row.samples
        lengths = micro_batch.row.sequences.lengths
        used = torch.nn.functional.pad(counts[samples], (0, len(lengths) - len(samples)))  # padding has no tokens
        _, position = places_of(lengths, 0, 1)
        rows.append(_whole(micro_batch, mesh)[position < used.repeat_interleave(lengths)])
    samples = torch.cat([micro_batch.row.samples for micro_batch in micro_batches])
    return cut(torch.cat(rows), spans(samples.argsort(), counts[samples]))


def _whole(micro_batch: MicroBatch, mesh: Mesh) -> Tensor:
    """Return the choices of all tokens of a micro-batch's row: [N, L, k], on the host."""
    assert micro_batch.choices is not None, "a pass without choices"
    mine = torch.cat(micro_batch.choices, dim=1)
    if mesh.cp_size == 1:
        return mine.cpu()
    parts = [torch.empty_like(mine) for _ in range(mesh.cp_size)]
    dist.all_gather(parts, mine, group=mesh.cp_group)
    whole = mine.new_empty(mesh.cp_size * len(mine), *mine.shape[1:])
    for cp_rank, part in enumerate(parts):
        places, _ = places_of(micro_batch.row.sequences.lengths, cp_rank, mesh.cp_size)
        whole.index_copy_(0, to_device(places, whole.device), part)
    return whole.cpu()
