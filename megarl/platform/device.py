"""The device that this process works with: CUDA or the CPU.

A command decides it once, before anything asks. All code that depends on the device asks here, and nothing asks torch:
torch also sees the devices of a host whose run is configured for the CPU.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_decided: list[str] = []  # at most one: `cuda` or `cpu`


def decide_device(wanted: str) -> str:
    """Decide for `cuda` or `cpu`, as configured by `auto | cuda | cpu`, and return the decision.

    Raises:
        ValueError: `cuda` is configured and torch sees no CUDA device.
    """
    import torch  # slow, and a configuration is checked without it

    # CUDA reads it as it starts. Megatron-Core counts on kernels that start in the order in which they are launched.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    available = wanted != "cpu" and torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ValueError("trainer.device=cuda, but torch sees no CUDA device; see `megarl doctor`")
    _decided[:] = ["cuda" if available else "cpu"]
    return _decided[0]


def on_cuda() -> bool:
    """Return whether this process works on CUDA. If nothing is decided yet, decide for CUDA if there is a device."""
    return (_decided[0] if _decided else decide_device("auto")) == "cuda"


def local_device() -> "torch.device":
    """Return this process's device: CUDA device number `LOCAL_RANK`, or the CPU."""
    import torch

    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_cuda() else torch.device("cpu")
