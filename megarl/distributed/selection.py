"""The largest of numbers that are spread over ranks, found by counting: no rank sends a number."""

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.exchange import host_group

DIGIT_BITS = 11  # of a number's 64 bits that one round decides


def kth_largest(numbers: Tensor, k: int, *, counts: bool) -> float:
    """Return the `k`-th largest of the numbers of all ranks, on each. Collective.

    Bits of a number that is not negative are in the order of the numbers, so the digits of the wanted number follow
    from counts, the highest first.

    Args:
        numbers: `[n]` float64 of this rank, none negative.
        k: from 1 to the number of all numbers.
        counts: True on exactly one of the ranks that have the same numbers.
    """
    left = numbers.view(torch.int64) if counts else numbers.new_empty(0).view(torch.int64)
    found = 0
    for shift in range(63 - 63 % DIGIT_BITS, -1, -DIGIT_BITS):
        digits = (left >> shift) & ((1 << DIGIT_BITS) - 1)
        histogram = torch.bincount(digits, minlength=1 << DIGIT_BITS)
        if dist.is_initialized():
            dist.all_reduce(histogram, group=host_group())
        at_least = histogram.flip(0).cumsum(0).flip(0)  # numbers with this digit or a larger one
        digit = int((at_least >= k).nonzero()[-1])
        k -= int(at_least[digit] - histogram[digit])
        left = left[digits == digit]
        found |= digit << shift
    return float(torch.tensor(found).view(torch.float64))
