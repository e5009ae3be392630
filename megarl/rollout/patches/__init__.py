"""Every replacement of code of vLLM, and of Python and torch under it, by subject.

Importing this package does not import vLLM. Invariant: nothing here changes what vLLM means to compute.
"""

from megarl.rollout.patches.blocks import cache_ready, note_freed_blocks
from megarl.rollout.patches.draws import draw_together
from megarl.rollout.patches.kernels import normalize_by_kernels
from megarl.rollout.patches.log_probs import DrawnTokens, keep_log_probs_in_arrays
from megarl.rollout.patches.process import (
    compilation,
    frozen,
    prepare_environment,
    random_state_kept,
    start_isolated,
)
from megarl.rollout.patches.ranks import skip_ranks
from megarl.rollout.patches.rotary import rotate_heads_correctly
from megarl.rollout.patches.router import choose_without_groups, note_router_logits
from megarl.rollout.patches.shared_memory import name_channels, name_message_queues

__all__ = [
    "DrawnTokens",
    "cache_ready",
    "compilation",
    "draw_together",
    "frozen",
    "keep_log_probs_in_arrays",
    "mend_cpu_build",
    "name_message_queues",
    "note_freed_blocks",
    "note_router_logits",
    "prepare_environment",
    "random_state_kept",
    "start_isolated",
]


def mend_cpu_build(channels: str | None) -> None:
    """Replace what is wrong or slow in vLLM's CPU build. `channels` is the argument of `name_channels`."""
    name_channels(channels)
    rotate_heads_correctly()
    normalize_by_kernels()
    choose_without_groups()
    skip_ranks()
