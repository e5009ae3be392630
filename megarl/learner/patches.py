"""Every change megarl makes to Megatron-Core, with the versions it was needed in and why."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as megatron_random


def apply_patches() -> None:
    """Install the patches this machine needs; calling it again changes nothing."""
    if not torch.cuda.is_available():
        _keep_random_state()
    _load_state_of_torch_optimizers()


def _keep_random_state() -> None:
    """megatron-core 0.16.1, 0.19.2: random states are swapped by callbacks that wait for CUDA.

    Without CUDA they never run and pile up, one per forked region. Nothing is drawn in those regions here: weights come
    from files, and there is no dropout.
    """

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
        return None

    def fork(self: Any, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    megatron_random.CudaRNGStatesTracker.fork = fork
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _load_state_of_torch_optimizers() -> None:
    """megatron-core 0.16.1, 0.19.2: loading the distributed optimizer asks the checkpoint for AdamW's `step` tensors.

    The checkpoint has one step for all, which is set before; what it does not have keeps its value. Transformer Engine
    and apex keep the step elsewhere and are not affected.
    """
    original = DistributedOptimizer._set_main_param_and_optimizer_states
    if getattr(original, "is_patched", False):
        return

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        original(self, model_param, self._get_main_param_and_optimizer_states(model_param) | tensors)

    set_states.is_patched = True  # type: ignore[attr-defined]
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
