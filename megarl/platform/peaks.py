"""The greatest speed of a device: as its maker publishes it, or as measured here."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

WARM_UP, REPEATS = 2, 5
ROWS = {"cuda": (8192,), "cpu": (256, 512, 1024, 2048)}  # and columns of the multiplied matrices
LONG_S = 0.1  # for a product; larger matrices would take eight times as long and hardly gain speed
COPIED_BYTES = {"cuda": 1 << 32, "cpu": 1 << 28}


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The speed of the arithmetic and of the memory of one device."""

    flops_per_second: float  # of products of matrices
    bytes_per_second: float  # read and written


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
    """Measure the fastest product of matrices of `dtype` and the fastest copy, on all cores of a CPU."""
    copied = COPIED_BYTES[device.type]
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Peaks(
        flops_per_second=_product_flops(device, dtype),
        bytes_per_second=2 * copied / _fastest(lambda: target.copy_(source), device),
    )


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
