"""Every replacement of code of vLLM, and of Python and torch under it, by subject.

Importing this package does not import vLLM. Invariant: nothing here changes what vLLM means to compute.
"""

from megarl.rollout.patches.kernels import normalize_by_kernels_on_the_cpu
from megarl.rollout.patches.process import (
    prepare_environment,
    random_state_kept,
    start_isolated,
    without_compilation,
)
from megarl.rollout.patches.rotary import rotate_heads_correctly
from megarl.rollout.patches.shared_memory import name_channels, name_message_queues

__all__ = [
    "name_channels",
    "name_message_queues",
    "normalize_by_kernels_on_the_cpu",
    "prepare_environment",
    "random_state_kept",
    "rotate_heads_correctly",
    "start_isolated",
    "without_compilation",
]
