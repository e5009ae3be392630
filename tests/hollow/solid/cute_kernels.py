"""Kernels in CuTe's language in vLLM: its compiler asks for a real device, so vLLM computes without them."""

from typing import Any


def multiply_by_router_without(module: Any) -> None:
    """Let vLLM take the next of its ways to multiply by a router's float32 weight: torch's."""
    module.is_available = lambda: False
