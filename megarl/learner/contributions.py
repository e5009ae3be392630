"""Sums over all ranks of what their micro-batches contribute to a global batch. Every function is collective."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.exchange import host_group, wait_for_all
from megarl.learner.parallel import Mesh


def add_metrics(contributions: Sequence[dict[str, Tensor]], mesh: Mesh, device: torch.device) -> dict[str, float]:
    """Add up each metric over all micro-batches of all ranks, in float64.

    Only the last pipeline stage has contributions. Micro-batches may have different metrics.
    """
    names = [sorted({name for metrics in contributions for name in metrics})]
    last = dist.get_world_size() - 1  # a rank of the last pipeline stage
    dist.broadcast_object_list(names, src=last, group=host_group())
    total = torch.zeros(len(names[0]), dtype=torch.float64, device=device)
    none = torch.zeros((), device=device)
    for metrics in contributions if mesh.shares.reports else ():
        total += torch.stack([metrics.get(name, none).double() for name in names[0]])
    dist.all_reduce(total)
    return dict(zip(names[0], total.tolist(), strict=True))


def wait_for_slowest(device: torch.device) -> None:
    """Wait until the devices of all ranks have finished, so that the time is counted and no collective hides it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    wait_for_all()
