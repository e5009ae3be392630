"""The device that this process works with."""

import os

import torch


def device_type(wanted: str) -> str:
    """Return `cuda` or `cpu` for the configured `auto | cuda | cpu`.

    Raises:
        ValueError: `cuda` is configured and torch sees no CUDA device.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ValueError("trainer.device=cuda, but torch sees no CUDA device; see `megarl doctor`")
    return ("cuda" if available else "cpu") if wanted == "auto" else wanted


def local_device(kind: str) -> torch.device:
    """Return this process's device: CUDA device number `LOCAL_RANK`, or the CPU."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")
