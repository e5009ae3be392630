"""The packages with fused kernels that Megatron-Core takes from CUDA machines, and whether this process uses them.

A process on the CPU hides them from Megatron-Core, which would otherwise prefer their kernels wherever they are
installed.
"""

from importlib.util import find_spec

from megarl.platform.device import on_cuda
from megarl.platform.hiding import hide

PACKAGES = ("transformer_engine", "apex", "amp_C")


def has_transformer_engine() -> bool:
    """Return True if Transformer Engine is installed and has a device to run on."""
    return on_cuda() and find_spec("transformer_engine") is not None


def has_apex_gradient_fusion() -> bool:
    """Return True if apex's fused weight-gradient kernel is installed and has a device to run on."""
    return on_cuda() and find_spec("fused_weight_gradient_mlp_cuda") is not None


def hide_on_cpu() -> None:
    """Hide the packages from Megatron-Core, should this process be on the CPU when Megatron-Core imports them."""
    for package in PACKAGES:
        hide(package, library="megatron", unless=on_cuda)  # D153
