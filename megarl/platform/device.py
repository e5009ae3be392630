"""The device that this process works with: CUDA or the CPU.

A command decides it once, before anything asks. All code that depends on the device asks here, and nothing asks torch:
torch also sees the devices of a host whose run is configured for the CPU.
"""

import os
from typing import TYPE_CHECKING

from megarl.platform.errors import UserError

if TYPE_CHECKING:
    import torch

_decided: list[str] = []  # at most one: `cuda` or `cpu`


def decide_device(wanted: str) -> str:
    """Decide for `cuda` or `cpu`, as configured by `auto | cuda | cpu`, and return the decision.

    Raises:
        UserError: `cuda` is configured and torch sees no CUDA device.
    """
    import torch  # slow, and a configuration is checked without it

    # CUDA reads it as it starts. Megatron-Core counts on kernels that start in the order in which they are launched.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    available = wanted != "cpu" and torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError("trainer.device=cuda, but torch sees no CUDA device; see `megarl doctor`")
    _decided[:] = ["cuda" if available else "cpu"]
    return _decided[0]


def on_cuda() -> bool:
    """Return whether this process works on CUDA. If nothing is decided yet, decide for CUDA if there is a device."""
    return (_decided[0] if _decided else decide_device("auto")) == "cuda"


def to_device(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """Return a copy on the device of a tensor of the host. The host does not wait for what the device does before."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def to_host(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return a copy in host memory, for `to_device` at once, and for the host when the device has done its work."""
    import torch

    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


class SideStream:
    """A stream of copies to the device, which run while the device computes."""

    def __init__(self) -> None:
        import torch

        self._stream = torch.cuda.Stream()

    def copy(self, to: "torch.Tensor", source: "torch.Tensor") -> None:
        """Begin to copy a pinned tensor of the host to the device, after what the device was asked for before."""
        import torch

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def join(self) -> None:
        """Let the device do what it is asked for from now on after the copies. The host does not wait."""
        import torch

        torch.cuda.current_stream().wait_stream(self._stream)


def local_device() -> "torch.device":
    """Return this process's device: CUDA device number `LOCAL_RANK`, or the CPU."""
    import torch

    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_cuda() else torch.device("cpu")
