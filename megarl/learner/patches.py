"""Every change megarl makes to Megatron-Core, with the versions it was needed in and why."""

from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random


def apply_patches() -> None:
    """Install the patches this machine needs; calling it again changes nothing."""
    if not torch.cuda.is_available():
        _random_states_of_the_cpu()


def _random_states_of_the_cpu() -> None:
    """megatron-core 0.16.1, 0.19.2: random states are swapped by callbacks that wait for CUDA.

    Without CUDA they never run and pile up, one per forked region; the states are those of the CPU generator instead.
    """

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
