"""The largest of numbers that are spread over ranks, found by counting: no rank sends a number."""

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.exchange import host_group

DIGIT_BITS = 11  # of a number's 64 bits that one round decides
_LOWEST = -1 << 63  # of signed integers


def kth_largest(numbers: Tensor, k: int, *, counts: bool) -> float:
    """Return the `k`-th largest of the numbers of all ranks, on each. Collective.

    Numbers have keys: integers in the same order. The digits of the wanted key follow from counts, the highest first.

    Args:
        numbers: `[n]` float64 of this rank, none NaN.
        k: from 1 to the number of all numbers.
        counts: True on exactly one of the ranks that have the same numbers.
    """
    left = _key(numbers.view(torch.int64)) ^ _LOWEST if counts else torch.empty(0, dtype=torch.int64)
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
    found &= (1 << 64) - 1  # the highest digit has bits to spare, which repeat the sign
    key = torch.tensor([found - (1 << 64) if found >> 63 else found]) ^ _LOWEST
    return float(_key(key).view(torch.float64))


def _key(bits: Tensor) -> Tensor:
    """Return signed integers in the order of float64 numbers, from their bits; or the bits, from such integers.

    Bits of negative numbers without the sign are in the opposite order.
    """
    return bits ^ ((bits >> 63) & ~_LOWEST)
