"""The model families by `model_type`: their traits, and the names in their checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The names of the parts of a layer with experts, in the checkpoint of a family."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"


@dataclass(frozen=True, kw_only=True)
class Family:
    """The traits that a `model_type` implies. `defaults` are transformers' values of fields missing in config.json."""

    qkv_bias: bool = False
    qk_norm: bool = False
    latent: bool = False
    experts: ExpertNames | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(defaults={"max_position_embeddings": 2048}),
    "mistral": Family(
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(qkv_bias=True, defaults=QWEN_DEFAULTS),
    "qwen3": Family(qk_norm=True, defaults=QWEN_DEFAULTS | {"head_dim": 128}),
    "mixtral": Family(
        experts=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2_moe": Family(
        qkv_bias=True,
        experts=ExpertNames(),
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3_moe": Family(
        qk_norm=True,
        experts=ExpertNames(),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "deepseek_v2": Family(
        latent=True,
        experts=ExpertNames(shared="shared_experts"),
        defaults=DEEPSEEK
        | {
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "topk_method": "greedy",
        },
    ),
    "deepseek_v3": Family(
        latent=True,
        experts=ExpertNames(shared="shared_experts"),
        defaults=DEEPSEEK
        | {
            "max_position_embeddings": 4096,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
    ),
}
