"""Megatron-Core asks for CUDA by name even where nothing needs it; here those calls are answered by the CPU.

Megatron-Core 0.16 to 0.19 creates small tensors with `device="cuda"`, asks `torch.cuda.current_device()` where to put
buffers, keeps CUDA generator states, copies on side streams and recognises parameters by
`tensor.type() == "torch.cuda.FloatTensor"`. On a machine without CUDA, `cuda_calls_on_cpu` redirects exactly these
while the block runs. Outside the block torch is untouched: vLLM, which lives in the same process, never sees a
redirected call.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

CPU = torch.device("cpu")
FACTORIES = (
    "tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
    "empty_strided",
)


class NoStream:
    """A CUDA stream, and an event on it, where everything is done when the call returns."""

    def wait_stream(self, stream: object) -> None:
        """Nothing is under way."""

    def record_event(self) -> "NoStream":
        """An event that has already happened."""
        return self

    def synchronize(self) -> None:
        """Nothing is under way."""


def megatron_platform() -> AbstractContextManager[None]:
    """The block in which Megatron-Core may be called: nothing special where CUDA exists, redirected calls elsewhere."""
    return nullcontext() if torch.cuda.is_available() else cuda_calls_on_cpu()


@contextmanager
def cuda_calls_on_cpu() -> Iterator[None]:
    """Answer the CUDA calls that Megatron-Core makes from the CPU. Blocks may nest."""
    tensor_type = torch.Tensor.type

    def type_as_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(tensor, *args, **kwargs)
        return f"torch.cuda.{answer.removeprefix('torch.')}" if type(answer) is str else answer

    with ExitStack() as stack:
        for name in FACTORIES:
            stack.enter_context(patch.object(torch, name, _on_cpu(getattr(torch, name))))
        stack.enter_context(patch.object(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor))
        if not torch.zeros(()).type().startswith("torch.cuda."):
            stack.enter_context(patch.object(torch.Tensor, "type", type_as_cuda))
        for name, answer in {
            "current_device": lambda: CPU,
            "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
            "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
            "manual_seed": lambda seed: torch.manual_seed(seed),
            "synchronize": lambda *args: None,
            "set_device": lambda device: None,
            "current_stream": lambda *args: None,
            "Stream": NoStream,
            "stream": lambda stream: nullcontext(),
        }.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        yield


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def redirected(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return redirected
