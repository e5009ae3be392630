"""The greatest speed of a device: as its maker publishes it, or as measured here."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch

from megarl.platform.heap import keep_freed_memory

WARM_UP = 2
REPEATS = 5
ROWS = {"cuda": (8192,), "cpu": (256, 512, 1024, 2048)}  # and columns of the multiplied matrices
TOKENS = 8192  # rows of a narrow product
WIDTHS = (128, 256, 512, 1024)
LONG_S = 0.1  # for a product; larger matrices would take eight times as long and hardly gain speed
COPIED_BYTES = {"cuda": 1 << 32, "cpu": 1 << 28}


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The speed of the arithmetic and of the memory of one device."""

    flops_per_second: float  # of products of matrices
    bytes_per_second: float  # read and written
    narrow_flops: Mapping[int, float] = field(default_factory=dict)  # FLOP/s by the width of a narrow model

    def flops_at(self, width: int) -> float:
        """Return the FLOP/s of a model whose hidden states have `width` numbers.

        Between two measured widths it follows the logarithm of the width; above them it is the greatest speed.
        """
        widest = 2 * max(self.narrow_flops, default=0)
        if width >= widest:
            return self.flops_per_second
        known = sorted({**self.narrow_flops, widest: self.flops_per_second}.items())
        for (low, slow), (high, fast) in pairwise(known):
            if low <= width < high:
                return slow + (fast - slow) * math.log(width / low) / math.log(high / low)
        return known[0][1]


PUBLISHED: Mapping[str, Peaks] = {
    "NVIDIA H100 80GB HBM3": Peaks(flops_per_second=989.4e12, bytes_per_second=3.35e12),
    "NVIDIA H200": Peaks(flops_per_second=989.4e12, bytes_per_second=4.8e12),
    "NVIDIA B200": Peaks(flops_per_second=2250e12, bytes_per_second=8e12),
}
"""By torch's name of the device, for dense bfloat16 matrices. Other boards of a chip have other clocks and names."""


def published_flops(device: torch.device, dtype: str) -> float | None:
    """Return the published FLOP/s of a device; None if they are unknown."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    peaks = PUBLISHED.get(torch.cuda.get_device_name(device))
    return peaks.flops_per_second if peaks else None


def measure(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Measure the fastest product of matrices of `dtype` and the fastest copy, on all cores of a CPU.

    On a CPU the products of narrow models are measured too: they are bound by memory, not by arithmetic. There the
    process keeps the memory that it frees, as a rank does.
    """
    copied = COPIED_BYTES[device.type]
    on_cpu = device.type == "cpu"
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bytes_per_second = 2 * copied / _fastest(lambda: target.copy_(source), device)
    if on_cpu:
        keep_freed_memory()
    return Peaks(
        flops_per_second=_product_flops(device, dtype),
        bytes_per_second=bytes_per_second,
        narrow_flops=_narrow_flops(dtype) if on_cpu else {},
    )


def _narrow_flops(dtype: torch.dtype) -> dict[int, float]:
    """Return the FLOP/s of a forward and a backward pass through square weights of each width, on the CPU."""
    found = {}
    for width in WIDTHS:
        states, gradient = (torch.randn(TOKENS, width).to(dtype) for _ in range(2))
        weight = torch.randn(width, width).to(dtype)
        seconds = _fastest(partial(_pass_through, weight, states, gradient), torch.device("cpu"))
        found[width] = 3 * 2 * TOKENS * width**2 / seconds
        if seconds > LONG_S:
            break
    return found


def _pass_through(weight: torch.Tensor, states: torch.Tensor, gradient: torch.Tensor) -> None:
    torch.mm(states, weight.T)
    torch.mm(gradient, weight)
    torch.mm(gradient.T, states)


def _product_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the greatest FLOP/s over growing matrices.

    A CPU that has no instructions for `dtype` needs 20 times as long, and minutes for the largest matrices.
    """
    greatest = 0.0
    for rows in ROWS[device.type]:
        one, other = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
        seconds = _fastest(partial(torch.mm, one, other, out=torch.empty_like(one)), device)
        greatest = max(greatest, 2 * rows**3 / seconds)
        if seconds > LONG_S:
            break
    return greatest


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest repetition after the warm-up."""
    seconds = []
    for _ in range(WARM_UP + REPEATS):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[WARM_UP:])
