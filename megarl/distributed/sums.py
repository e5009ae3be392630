"""Sums, largest and smallest of numbers that are spread over ranks, equal on every rank however they are spread.

A sum is exact until its end: the numbers are added as integers, in units of the smallest float64, and the result is the
float64 nearest to their sum. So neither the order of the numbers nor the rank that adds them shows, and ranks exchange
a few hundred bytes for each sum instead of the numbers.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.columns import Integers
from megarl.distributed.exchange import all_reduce
from megarl.distributed.selection import order_keys

MANTISSA_BITS = 52  # of a float64, without the leading one
UNIT = 1074  # the smallest float64 is 2 ** -UNIT
DIGIT_BITS = 32
NUM_DIGITS = (UNIT + 1024) // DIGIT_BITS + 2
"""Digits of `DIGIT_BITS` bits that hold any float64 in units of the smallest, and the carry of many."""
OTHERS = (np.isnan, np.isposinf, np.isneginf)
"""The numbers that are counted instead of added."""


def exact_sums(numbers: Tensor, *, counts: bool = True) -> Tensor:
    """Return the sums of the columns of all ranks, each the float64 nearest to the exact sum. Collective.

    A sum is NaN with a NaN or with infinities of both signs, and infinite with infinities of one. Up to 2 ** 29 numbers
    of all ranks have room.

    Args:
        numbers: `[b, ...]` of this rank, of any type, in host memory.
        counts: True on exactly one of the ranks that have the same numbers.

    Returns:
        `[...]` float64, the same on every rank.
    """
    columns = numbers.double().reshape(len(numbers), math.prod(numbers.shape[1:])).numpy()
    digits = torch.from_numpy(_digits(columns if counts else columns[:0]))
    if dist.is_initialized():
        all_reduce(digits)
    sums = [_nearest(of_column) for of_column in digits.numpy()]
    return torch.tensor(sums, dtype=torch.float64).reshape(numbers.shape[1:])


def extremes(numbers: Tensor, *, counts: bool = True) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest number of each column of all ranks. Collective.

    Both are NaN with a NaN, and infinite of the wrong sign without numbers.

    Args:
        numbers: `[b, ...]` of this rank, of any type, in host memory.
        counts: False on a rank whose numbers other ranks have, or that has none to give.

    Returns:
        `[...]` float64 twice, the same on every rank.
    """
    columns = (numbers if counts else numbers[:0]).double()
    columns = torch.cat([columns, torch.full((1, *columns.shape[1:]), -torch.inf, dtype=torch.float64)])
    mirrored = -columns
    mirrored[-1] = -torch.inf
    both = torch.stack([columns, mirrored])
    keys = order_keys(both.view(torch.int64)).masked_fill(both.isnan(), torch.iinfo(torch.int64).max).amax(1)
    if dist.is_initialized():
        all_reduce(keys, op=dist.ReduceOp.MAX)
    largest, smallest = order_keys(keys).view(torch.float64)
    return largest, -smallest


def _digits(columns: npt.NDArray[np.float64]) -> Integers:
    """Return the sum of each of `k` columns, `[n, k]`, as digits, the lowest first, and the counts of `OTHERS`.

    A digit may be negative, or larger than its bits have room for.
    """
    finite = np.isfinite(columns)
    bits = np.where(finite, columns, 0.0).view(np.int64)
    exponents = (bits >> MANTISSA_BITS) & 0x7FF
    mantissas = (bits & ((1 << MANTISSA_BITS) - 1)) | ((exponents > 0).astype(np.int64) << MANTISSA_BITS)
    places, shifts = np.divmod(np.maximum(exponents, 1) - 1, DIGIT_BITS)
    low = (mantissas & (2**DIGIT_BITS - 1)) << shifts
    high = (mantissas >> DIGIT_BITS) << shifts
    signs = np.where(bits < 0, -1, 1)
    found = np.zeros((columns.shape[1], NUM_DIGITS + len(OTHERS)), dtype=np.int64)
    places += np.arange(columns.shape[1]) * found.shape[1]
    parts = (low & (2**DIGIT_BITS - 1), (low >> DIGIT_BITS) + (high & (2**DIGIT_BITS - 1)), high >> DIGIT_BITS)
    for later, part in enumerate(parts):
        np.add.at(found.reshape(-1), places + later, signs * part)
    if not finite.all():
        found[:, NUM_DIGITS:] = np.stack([is_other(columns).sum(0) for is_other in OTHERS], axis=-1)
    return found


def _nearest(found: Integers) -> float:
    """Return the float64 nearest to a sum that `_digits` made."""
    num_nan, num_positive, num_negative = found[NUM_DIGITS:].tolist()
    if num_nan or (num_positive and num_negative):
        return math.nan
    if num_positive or num_negative:
        return math.inf if num_positive else -math.inf
    used = np.flatnonzero(found[:NUM_DIGITS]).tolist()
    total = sum(int(found[place]) << (DIGIT_BITS * place) for place in used)
    try:
        return total / (1 << UNIT)  # Python divides integers to the nearest
    except OverflowError:
        return math.inf if total > 0 else -math.inf
