"""CUDA calls of Megatron-Core, answered by the CPU on machines without CUDA.

Outside the block of `cuda_calls_on_cpu` torch is untouched: vLLM, which lives in the same process, never meets a
redirected call.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from megarl.learner.patches.megatron import declare_megatron
from megarl.platform.device import on_cuda
from megarl.platform.patching import replace, replaced

CPU = torch.device("cpu")
_ASKS_FOR_CUDA = {
    "upstream": "e.g. megatron/core/optimizer/optimizer.py: Float16OptimizerWithFloat16Params",
    "until": "Megatron-Core takes the device from the model or from an accelerator API everywhere",
}
FACTORIES = declare_megatron(
    "torch",
    *("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "ones_like", "empty_strided"),
    reason="creates small tensors with device='cuda' or on torch.cuda.current_device()",
    **_ASKS_FOR_CUDA,
)
COPY = declare_megatron("torch:Tensor", "cuda", reason="copies tensors to CUDA with Tensor.cuda()", **_ASKS_FOR_CUDA)
TYPE = declare_megatron(
    "torch:Tensor", "type", reason="recognises parameters by type() == 'torch.cuda.FloatTensor'", **_ASKS_FOR_CUDA
)
DEVICE = declare_megatron(
    "torch.cuda",
    *("current_device", "set_device", "synchronize", "current_stream", "stream", "Stream"),
    *("get_rng_state", "set_rng_state", "manual_seed"),
    reason="asks for the device, its generator and side streams",
    **_ASKS_FOR_CUDA,
)
STATES = declare_megatron(
    "megatron.core.tensor_parallel.random",
    "_get_cuda_rng_state",
    "_set_cuda_rng_state",
    reason="random states are swapped by callbacks that wait for CUDA; without CUDA they never run and pile up",
    upstream="megatron/core/tensor_parallel/random.py: _set_cuda_rng_state",
    until="Megatron-Core skips the swap without CUDA",
)
FORK = declare_megatron(
    "megatron.core.tensor_parallel.random:CudaRNGStatesTracker",
    "fork",
    reason="each forked region swaps random states; nothing is drawn in these regions without dropout",
    upstream="megatron/core/tensor_parallel/random.py: CudaRNGStatesTracker.fork",
    until="Megatron-Core skips the swap without CUDA",
)


class NoStream:
    """A CUDA stream, and an event on it, for work that is done when the call returns."""

    def wait_stream(self, stream: object) -> None:
        """Return at once: nothing is under way."""

    def record_event(self) -> "NoStream":
        """Return an event that has already happened."""
        return self

    def synchronize(self) -> None:
        """Return at once: nothing is under way."""


def megatron_platform() -> AbstractContextManager[None]:
    """Return the block in which Megatron-Core may be called. With CUDA it changes nothing."""
    return nullcontext() if on_cuda() else cuda_calls_on_cpu()


@contextmanager
def cuda_calls_on_cpu() -> Iterator[None]:
    """Answer the CUDA calls that Megatron-Core makes from the CPU. Blocks may nest."""
    original: Callable[..., str | torch.Tensor] = torch.Tensor.type

    def type_as_cuda(tensor: torch.Tensor, *args: object, **kwargs: object) -> str | torch.Tensor:
        name = original(tensor, *args, **kwargs)
        return f"torch.cuda.{name.rpartition('.')[2]}" if isinstance(name, str) else name

    with ExitStack() as stack:
        stack.enter_context(replaced(FACTORIES, **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES.names}))
        stack.enter_context(replaced(COPY, cuda=lambda tensor, *args, **kwargs: tensor))
        if not torch.zeros(()).type().startswith("torch.cuda."):
            stack.enter_context(replaced(TYPE, type=type_as_cuda))
        stack.enter_context(
            replaced(
                DEVICE,
                current_device=lambda: CPU,
                set_device=lambda device: None,
                synchronize=lambda *args: None,
                current_stream=lambda *args: None,
                stream=lambda stream: nullcontext(),
                Stream=NoStream,
                get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
                set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
                manual_seed=lambda seed: torch.manual_seed(seed),
            )
        )
        yield


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def redirected(
        *args: object, device: torch.device | str | int | None = None, pin_memory: bool = False, **kwargs: object
    ) -> torch.Tensor:
        is_cuda = torch.device(device or "cpu").type == "cuda"
        return factory(*args, device=CPU if is_cuda else device, **kwargs)

    return redirected


def keep_random_state() -> None:
    """Leave the random state alone in forked regions.

    Nothing is drawn in these regions here: weights come from files, and there is no dropout.
    """
    replace(FORK, fork=lambda self, name="": nullcontext())
    replace(
        STATES,
        _get_cuda_rng_state=lambda *_, **__: torch.empty(0, dtype=torch.uint8),
        _set_cuda_rng_state=lambda *_, **__: None,
    )
