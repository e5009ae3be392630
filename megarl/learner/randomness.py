"""The generators that a rank draws from: torch's own, and Megatron's, one for what its parallel group must draw alike.

Only dropout draws from Megatron's, where `override_transformer_config` asks for it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel


def random_states() -> dict[str, Any]:
    """The state of every generator of this rank, in tensors."""
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: Mapping[str, Any]) -> None:
    """Bring the generators to where `random_states` found them; what other generators of Megatron's there are, stay."""
    torch.set_rng_state(states["cpu"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states(tracker.get_states() | states.get("megatron", {}))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
