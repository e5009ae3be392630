"""The largest of numbers that are spread over ranks, found by counting: no rank sends a number."""

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import BLOCK
from megarl.distributed.exchange import host_group

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
    lowest = torch.iinfo(integers).min
    blocks = [_key(block) ^ lowest for block in numbers.view(integers).split(BLOCK)] if counts else []
    found = 0
    for shift in range((num_bits - 1) // DIGIT_BITS * DIGIT_BITS, -1, -DIGIT_BITS):
        histogram = torch.zeros(1 << DIGIT_BITS, dtype=torch.int64)
        for block in blocks:
            histogram += torch.bincount(_digits(block, shift), minlength=len(histogram))
        if dist.is_initialized():
            dist.all_reduce(histogram, group=host_group())
        at_least = histogram.flip(0).cumsum(0).flip(0)  # numbers with this digit or a larger one
        digit = int((at_least >= k).nonzero()[-1])
        k -= int(at_least[digit] - histogram[digit])
        blocks = [block[_digits(block, shift) == digit] for block in blocks]
        found |= digit << shift
    found &= (1 << num_bits) - 1  # the highest digit has bits to spare, which repeat the sign
    signed = found - (1 << num_bits) if found >> (num_bits - 1) else found
    return float(_key(torch.tensor([signed], dtype=integers) ^ lowest).view(numbers.dtype))


def _digits(keys: Tensor, shift: int) -> Tensor:
    return (keys >> shift) & ((1 << DIGIT_BITS) - 1)


def _key(bits: Tensor) -> Tensor:
    """Return signed integers in the order of floating-point numbers, from their bits; or the bits, from such integers.

    Bits of negative numbers without the sign are in the opposite order.
    """
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)
