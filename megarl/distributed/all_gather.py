"""Brings a tensor of each rank to all ranks of a list, in rounds whose number grows with the logarithm of the ranks.

Bruck et al. 1997, "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems", section 4.
gloo's own collective passes each tensor on from rank to rank.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.exchange import GATHERED, begin_receiving, begin_sending


def all_gather(mine: Tensor, ranks: Sequence[int], sizes: Tensor) -> Tensor:
    """Return the tensors of all `ranks`, end to end in their order. Collective over these ranks.

    Args:
        mine: a tensor in host memory, of one dimension and of the same type on all ranks.
        ranks: this rank is among them.
        sizes: int64, of the tensors, in the order of `ranks`.
    """
    number = len(ranks)
    place = ranks.index(dist.get_rank())
    ends = [0, *sizes.roll(-place).cumsum(0).tolist()]  # of this rank's tensor and of those after it, around the list
    found = mine
    count = 1  # of the tensors in `found`
    while count < number:
        coming = min(count, number - count)
        content = torch.empty(ends[count + coming] - ends[count], dtype=mine.dtype)
        target, source = (ranks[(place + step) % number] for step in (-count, count))
        sending = begin_sending(found[: ends[coming]], target, tag=GATHERED)
        begin_receiving(content, source, tag=GATHERED).wait()
        sending.wait()
        found = torch.cat([found, content])
        count += coming
    first = ends[number - place]  # of the tensor of the first of `ranks`
    return torch.cat([found[first:], found[:first]])
