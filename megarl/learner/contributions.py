"""Sums over all ranks of what their micro-batches contribute to a global batch. Every function is collective."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Rollouts, row_places
from megarl.distributed.exchange import host_group, wait_for_all
from megarl.learner.parallel import Mesh
from megarl.learner.schedule import MicroBatch
from megarl.platform.device import to_device


def add_outputs(
    micro_batches: Sequence[MicroBatch],
    outputs: Sequence[Tensor],
    batch: Rollouts,
    mesh: Mesh,
    *,
    num_outputs: int,
    device: torch.device,
) -> list[Tensor]:
    """Bring the outputs of all micro-batches to all ranks.

    Args:
        micro_batches: of this rank.
        outputs: [K, b, T] float32 of each of them; only the last pipeline stage has any.
        batch: the global batch.
        mesh: this rank's place.
        num_outputs: K.
        device: of the collective.

    Returns:
        K tensors [N] float32 on the host, zero outside the mask of `batch`.
    """
    wait_for_slowest(device)
    found = torch.zeros(num_outputs, len(batch.mask), device=device)
    if mesh.reports_its_samples:
        for micro_batch, numbers in zip(micro_batches, outputs, strict=True):
            samples = micro_batch.row.samples
            places = to_device(row_places(batch.num_tokens[samples]), device)
            tokens = numbers.flatten(1).index_select(1, places)
            found.index_copy_(1, to_device(batch.token_places(samples), device), tokens)
    dist.all_reduce(found)  # exactly one rank contributes each number
    return list(found.cpu())


def add_metrics(contributions: Sequence[dict[str, Tensor]], mesh: Mesh, device: torch.device) -> dict[str, float]:
    """Add up each metric over all micro-batches of all ranks, in float64.

    Only the last pipeline stage has contributions. Micro-batches may have different metrics.
    """
    names = [sorted({name for metrics in contributions for name in metrics})]
    last = dist.get_world_size() - 1  # a rank of the last pipeline stage
    dist.broadcast_object_list(names, src=last, group=host_group())
    total = torch.zeros(len(names[0]), dtype=torch.float64, device=device)
    none = torch.zeros((), device=device)
    for metrics in contributions if mesh.reports_its_samples else ():
        total += torch.stack([metrics.get(name, none).double() for name in names[0]])
    dist.all_reduce(total)
    return dict(zip(names[0], total.tolist(), strict=True))


def wait_for_slowest(device: torch.device) -> None:
    """Wait until the devices of all ranks have finished, so that the time is counted and no collective hides it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    wait_for_all()


def largest(here: int, device: torch.device) -> int:
    """Return on all ranks the largest of their small numbers `here`."""
    found = torch.full((), float(here), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)
