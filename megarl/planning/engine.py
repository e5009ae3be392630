"""The memory of the engine on one rank: weights, the activations of its largest step, and its caches.

The KV cache follows vLLM's rule: `gpu_memory_utilization` of the device is the engine's, and what weights and the
largest step leave of it holds keys and values. The engine starts before the trainer's models, on an empty device.
"""

from dataclasses import dataclass

from megarl.models.architecture import Architecture
from megarl.planning.states import DTYPE_BYTES, FLOAT32
from megarl.rollout.config import RolloutSection


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes on one rank."""

    weights: int
    activations: int
    budget: int  # all bytes that the engine may take
    bytes_per_token: int  # of the KV cache
    memories: int = 0  # of linear attention, for all sequences
    route_bytes: int = 0  # of the routes of a token in the KV cache

    @property
    def kv_cache(self) -> int:
        """Return the bytes that are left for keys and values."""
        return max(0, self.budget - self.weights - self.activations - self.memories)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the cache of one replica holds."""
        return self.kv_cache // self.bytes_per_token

    @property
    def routes(self) -> int:
        """Return the bytes of the routes of all tokens in the cache."""
        return self.num_tokens * self.route_bytes

    def shortfall(self, num_tokens: int) -> int:
        """Return the bytes missing for weights, the largest step and one sequence of `num_tokens`; 0 if they fit."""
        rest = self.activations + self.memories + num_tokens * self.bytes_per_token
        return max(0, self.weights + rest - self.budget)


def engine_memory(
    architecture: Architecture, section: RolloutSection, *, weights: int, device_bytes: int
) -> EngineMemory:
    """Return the engine's memory on a rank with `weights` bytes of the model and a device of `device_bytes`."""
    return EngineMemory(
        weights=weights,
        activations=step_bytes(architecture, section),
        budget=int(device_bytes * section.gpu_memory_utilization),
        bytes_per_token=cache_bytes_per_token(architecture, section),
        memories=memory_bytes(architecture, section),
        route_bytes=route_bytes(architecture, section),
    )


def route_bytes(architecture: Architecture, section: RolloutSection) -> int:
    """Return the bytes of the routes of one token in all layers; 0 if the engine keeps none."""
    if section.routing_replay == "none":
        return 0
    return architecture.route_bytes(with_scores=section.routing_replay == "engine_scores")


def cache_bytes_per_token(architecture: Architecture, section: RolloutSection) -> int:
    """Return the bytes of keys and values of one token on one rank, over all layers.

    A rank holds its share of the key-value heads, and at least one; latent attention stores one latent with the rotary
    part of the key, the same on every rank.
    """
    latent = architecture.latent
    if latent:
        elements = latent.kv_lora_rank + latent.qk_rope_head_dim
    else:
        heads = max(1, architecture.num_key_value_heads // section.tensor_model_parallel_size)
        elements = 2 * heads * architecture.head_dim
    return architecture.num_caching_layers * elements * DTYPE_BYTES[section.dtype]


def memory_bytes(architecture: Architecture, section: RolloutSection) -> int:
    """Return the bytes on one rank of the memories of linear attention, for `max_num_seqs` sequences."""
    linear = architecture.linear
    if linear is None:
        return 0
    of_sequence = (
        len(linear.layers) * linear.memory_size * DTYPE_BYTES[section.dtype] // section.tensor_model_parallel_size
    )
    return section.max_num_seqs * of_sequence


def step_bytes(architecture: Architecture, section: RolloutSection) -> int:
    """Estimate the bytes of the largest step without its cache; CUDA graphs and the memory of libraries are extra.

    `max_num_batched_tokens` tokens have hidden states, their residual and the widest pair of tensors of a layer;
    `max_num_seqs` of them have logits over the whole vocabulary, in the weights' type, in float32, and as float32
    log-probabilities.
    """
    a = architecture
    tp = section.tensor_model_parallel_size
    itemsize = DTYPE_BYTES[section.dtype]
    heads = 2 * (a.num_attention_heads + a.num_key_value_heads) * a.head_dim / tp  # queries, keys, values and output
    widths = [heads, 3 * a.ffn_hidden_size / tp]  # gate, up and their product
    experts = a.experts
    if experts:
        widths.append(experts.top_k * (3 * experts.ffn_hidden_size / tp + a.hidden_size))
    tokens = section.max_num_batched_tokens * (2 * a.hidden_size + max(widths)) * itemsize
    return int(tokens + section.max_num_seqs * a.vocab_size * (itemsize + 2 * FLOAT32))
