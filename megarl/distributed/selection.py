"""The largest of numbers that are spread over ranks, found by counting: no rank sends a number."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.exchange import all_reduce

DIGIT_BITS = 11  # of a number's bits that one round decides


def kth_largest(numbers: Tensor, k: int, *, counts: bool) -> float:
    """Return the `k`-th largest of the numbers of all ranks, on each. Collective.

    Numbers have keys: integers in the same order. The digits of the wanted key follow from counts, the highest first.

    Args:
        numbers: `[n]` float32 or float64 of this rank, none NaN.
        k: from 1 to the number of all numbers.
        counts: True on exactly one of the ranks that have the same numbers.
    """
    num_bits = 8 * numbers.element_size()
    integers = {32: torch.int32, 64: torch.int64}[num_bits]
    mine = np.sort((numbers if counts else numbers[:0]).numpy())  # sorted so that counts follow from places
    found = torch.iinfo(integers).min
    for shift in range((num_bits - 1) // DIGIT_BITS * DIGIT_BITS, -1, -DIGIT_BITS):
        digits = torch.arange(1 << min(DIGIT_BITS, num_bits - shift))
        keys = (found + (digits << shift)).to(integers)
        borders = order_keys(keys).view(numbers.dtype)
        borders = borders.masked_fill(borders.isnan() & (keys < 0), -torch.inf)  # those below all numbers
        at_least = torch.from_numpy(len(mine) - mine.searchsorted(borders.numpy()))
        if dist.is_initialized():
            all_reduce(at_least)
        found = int(keys[int((at_least >= k).sum()) - 1])
    return float(order_keys(torch.tensor([found], dtype=integers)).view(numbers.dtype))


def order_keys(bits: Tensor) -> Tensor:
    """Return signed integers in the order of floating-point numbers, from their bits; or the bits, from such integers.

    Bits of negative numbers without the sign are in the opposite order.
    """
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)
