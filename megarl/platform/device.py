"""The device that this process works with."""

import os
import resource

import torch


def device_type(wanted: str) -> str:
    """Return `cuda` or `cpu` for the configured `auto | cuda | cpu`.

    Raises:
        ValueError: `cuda` is configured and torch sees no CUDA device.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ValueError("trainer.device=cuda, but torch sees no CUDA device; see `python -m megarl.doctor`")
    return ("cuda" if available else "cpu") if wanted == "auto" else wanted


def local_device(kind: str) -> torch.device:
    """Return this process's device: CUDA device number `LOCAL_RANK`, or the CPU."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")


def peak_memory() -> dict[str, float]:
    """Return the most memory that this process has held since it began, as metrics in GB: host, and device on CUDA."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts KiB
    device = {"perf/device_memory_gb": torch.cuda.max_memory_reserved() / 1e9} if torch.cuda.is_initialized() else {}
    return {"perf/host_memory_gb": host} | device
