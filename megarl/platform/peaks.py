"""The greatest speed of a device: as its maker publishes it, or as measured here."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

WARM_UP, REPEATS = 2, 5
ROWS = {"cuda": 8192, "cpu": 2048}  # and columns of the multiplied matrices
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
    rows, copied = ROWS[device.type], COPIED_BYTES[device.type]
    one, other = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(one)
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Peaks(
        flops_per_second=2 * rows**3 / _fastest(lambda: torch.mm(one, other, out=product), device),
        bytes_per_second=2 * copied / _fastest(lambda: target.copy_(source), device),
    )


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
