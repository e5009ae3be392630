"""How large a KV cache has to be, and how much host memory that of the CPU engine may take.

On CPU vLLM fills that memory with zeros when it starts, so a generous bound costs seconds and resident pages on every
rank: it gets what one `generate` can use, and no more than its share of the memory that is available.
"""

import os
from collections.abc import Mapping

import psutil  # type: ignore[import-untyped]

from megarl.rollout.config import RolloutSection

BLOCK = 128  # tokens per cache block of vLLM's CPU backend
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def cpu_cache_bytes(section: RolloutSection, bytes_per_token: int, *, num_sequences: int, max_model_len: int) -> int:
    """Bytes for `num_sequences` sequences of `max_model_len` tokens, within this rank's share of available memory.

    ValueError where not even one sequence fits.
    """
    block = BLOCK * bytes_per_token
    one = -(-max_model_len // BLOCK) * block
    available = psutil.virtual_memory().available * section.gpu_memory_utilization
    share = int(available) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if one + block > share:
        raise ValueError(
            f"The KV cache of one sequence of {max_model_len} tokens takes {one >> 20} MiB, but this rank may use "
            f"{share >> 20} MiB; lower data.max_response_length or raise "
            "actor_rollout_ref.rollout.gpu_memory_utilization"
        )
    return min(one * num_sequences + block, share)  # vLLM keeps one block of its pool for itself


def check_cache_tokens(num_tokens: int, max_model_len: int) -> None:
    """Where not even one sequence fits, vLLM would set it back again and again, without end.

    Raises:
        ValueError: a KV cache of `num_tokens` is too small for one of `max_model_len`.
    """
    if num_tokens < max_model_len:
        raise ValueError(
            f"The engine's KV cache holds {num_tokens} tokens, and one prompt with its response may have "
            f"{max_model_len}: raise actor_rollout_ref.rollout.gpu_memory_utilization, remove what makes the cache "
            "smaller from rollout.engine_kwargs, or lower data.max_response_length"
        )


def cache_bytes_per_token(
    section: RolloutSection, shapes: Mapping[str, tuple[int, ...]], *, num_key_value_heads: int
) -> int:
    """Keys and values of one token on one rank, over all layers; a rank holds at least one head.

    Latent attention on CPU caches expanded keys, and values padded to their size, for every query head.
    """
    if any(name.endswith("kv_b_proj.weight") for name in shapes):
        rows = 2 * _num_rows(shapes, "q_proj.weight", "q_b_proj.weight")
    else:
        rows = _num_rows(shapes, "k_proj.weight", "v_proj.weight")
    heads_per_rank = -(-num_key_value_heads // section.tensor_model_parallel_size)
    return rows // num_key_value_heads * heads_per_rank * DTYPE_BYTES[section.dtype]


def _num_rows(shapes: Mapping[str, tuple[int, ...]], *endings: str) -> int:
    return sum(shape[0] for name, shape in shapes.items() if name.endswith(endings))
