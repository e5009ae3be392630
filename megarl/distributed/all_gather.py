"""Brings a tensor of each rank to all ranks of a list, in rounds whose number grows with the logarithm of the ranks.

Bruck et al. 1997, "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems", section 4.
gloo's own collective passes each tensor on from rank to rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.exchange import host_group


def all_gather(mine: Tensor, ranks: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    """Return the tensors of all `ranks`, in their order. Collective over these ranks.

    Args:
        mine: a tensor in host memory, of one dimension and of the same type on all ranks.
        ranks: this rank is one of them.
        sizes: of the tensors, in the order of `ranks`.
    """
    number = len(ranks)
    place = ranks.index(dist.get_rank())
    found = [mine]  # of this rank and of those after it, around the list
    while len(found) < number:
        distance = len(found)
        count = min(distance, number - distance)
        coming = [sizes[(place + distance + later) % number] for later in range(count)]
        content = torch.empty(sum(coming), dtype=mine.dtype)
        target, source = (ranks[(place + step) % number] for step in (-distance, distance))
        sending: Any = dist.isend(torch.cat(found[:count]), target, group=host_group())
        dist.recv(content, source, group=host_group())
        sending.wait()
        found += content.split(coming)
    return [found[(other - place) % number] for other in range(number)]
