"""The minimum size of a KV cache, and the host memory that the cache of the CPU engine may use.

On CPU vLLM fills the cache with zeros when it starts, so a generous size costs seconds and resident pages on every
rank. The cache gets as much as one `generate` can use, but not more than the rank's share of the available memory.
"""

import os

import psutil  # type: ignore[import-untyped]

from megarl.models.architecture import Architecture
from megarl.platform.errors import UserError
from megarl.rollout.config import RolloutSection

BLOCK = 128  # tokens per cache block of vLLM's CPU backend
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def cpu_cache_bytes(
    section: RolloutSection,
    bytes_per_token: int,
    *,
    num_sequences: int,
    max_model_len: int,
    memory_bytes: int = 0,
) -> int:
    """Return the bytes for `num_sequences` sequences of `max_model_len` tokens, at most this rank's share of memory.

    `memory_bytes` of a sequence are added to its keys and values.

    Raises:
        UserError: the share does not hold one sequence.
    """
    block = BLOCK * bytes_per_token
    one = -(-max_model_len // BLOCK) * block + memory_bytes
    available = psutil.virtual_memory().available * section.gpu_memory_utilization
    share = int(available) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if one + block > share:
        raise UserError(
            f"The KV cache of one sequence of {max_model_len} tokens takes {one >> 20} MiB, but this rank may use "
            f"{share >> 20} MiB; lower data.max_response_length or raise "
            "actor_rollout_ref.rollout.gpu_memory_utilization"
        )
    return min(one * num_sequences + block, share)  # vLLM keeps one block of its pool for itself


def check_cache_tokens(num_tokens: int, max_model_len: int) -> None:
    """Refuse a KV cache that does not hold one sequence: vLLM would preempt the sequence again and again.

    Raises:
        UserError: a KV cache of `num_tokens` is too small for a sequence of `max_model_len`.
    """
    if num_tokens < max_model_len:
        raise UserError(
            f"The engine's KV cache holds {num_tokens} tokens, and one prompt with its response may have "
            f"{max_model_len}: raise actor_rollout_ref.rollout.gpu_memory_utilization, remove from "
            "rollout.engine_kwargs settings that shrink the cache, or lower data.max_response_length"
        )


def cpu_cache_bytes_per_token(section: RolloutSection, architecture: Architecture) -> int:
    """Return the bytes of a token's keys and values on one rank, over all layers. A rank holds at least one head.

    Latent attention on CPU caches expanded keys, and values padded to their size, for every query head.
    """
    heads_per_rank = -(-architecture.num_key_value_heads // section.tensor_model_parallel_size)
    numbers = 2 * heads_per_rank * architecture.head_dim
    return architecture.num_caching_layers * numbers * DTYPE_BYTES[section.dtype]


def cpu_memory_bytes(section: RolloutSection, architecture: Architecture) -> int:
    """Return the bytes of a sequence's memories of linear attention on one rank, and of the room around them.

    All blocks of vLLM's cache have one size, at least that of a memory. A layer with linear attention has two blocks of
    a sequence, because prefixes are cached; in any other layer the last block of a sequence may be almost empty.
    """
    linear = architecture.linear
    if linear is None:
        return 0
    num_blocks = 2 * len(linear.layers) + architecture.num_caching_layers
    return num_blocks * linear.memory_size * DTYPE_BYTES[section.dtype] // section.tensor_model_parallel_size
