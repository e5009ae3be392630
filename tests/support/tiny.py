"""Tiny random checkpoints of every family, as `transformers` writes them."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
DEEPSEEK: dict[str, Any] = {
    **EXPERTS,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "hidden_size": 128, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "mixtral": {
        "model_type": "mixtral",
        "intermediate_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **EXPERTS,
        "hidden_size": 128,
        "num_experts": 8,
        "shared_expert_intermediate_size": 96,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "num_experts": 8, "norm_topk_prob": True},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **EXPERTS,
        "num_experts": 8,
        "shared_expert_intermediate_size": 96,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "full_attention_interval": 2,
    },
    "qwen3_5_text": {
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "full_attention_interval": 2,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe_text": {
        "model_type": "qwen3_5_moe_text",
        **EXPERTS,
        "num_experts": 8,
        "shared_expert_intermediate_size": 96,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "full_attention_interval": 2,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **DEEPSEEK,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **DEEPSEEK,
        "q_lora_rank": 48,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **EXPERTS,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        **DEEPSEEK,
        "q_lora_rank": 48,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0], "tie_word_embeddings": False},
    "ministral3": {
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "phi3": {"model_type": "phi3"},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 6.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
    },
    "olmo2": {"model_type": "olmo2", "hidden_size": 128},
    "olmo3": {
        "model_type": "olmo3",
        "hidden_size": 128,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
    "hunyuan_v1_dense": {
        "model_type": "hunyuan_v1_dense",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "qwen3-yarn": {
        "model_type": "qwen3",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 6},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "sliding_window": 6,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ernie4_5": {"model_type": "ernie4_5", "tie_word_embeddings": True},
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 64,
        "tie_word_embeddings": False,
    },
    "seed_oss": {"model_type": "seed_oss", "attention_dropout": 0.0, "residual_dropout": 0.0},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "sliding_window": 6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 128,
        "num_key_value_heads": 4,
    },
}


def write_checkpoint(directory: Path, variant: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random float32 checkpoint with weights large enough to matter, and return `directory`."""
    settings = SIZES | VARIANTS[variant] | overrides
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_random(model, directory)
    return directory


def write_config(directory: Path, variant: str) -> Path:
    """Write the description of a model without weights, and return `directory`."""
    settings = SIZES | VARIANTS[variant]
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(directory)
    return directory


def write_classifier(directory: Path, variant: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random float32 checkpoint that gives a sequence one score, and return `directory`."""
    settings = SIZES | VARIANTS[variant] | {"num_labels": 1, "pad_token_id": 0} | overrides
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    save_random(model, directory)
    return directory


def save_random(model: Any, directory: Path) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.1)
            if name.endswith("A_log"):
                parameter.sub_(4.0)  # memories of linear attention last for many tokens
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    model.save_pretrained(directory)


def plant_code(directory: Path) -> Path:
    """Give a checkpoint its own Python code for config and model; return the file that it creates when it runs."""
    witness = directory / "code_was_run"
    (directory / "modeling_planted.py").write_text(
        f"from pathlib import Path\nPath({str(witness)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig): pass\nclass Model(LlamaForCausalLM): pass\n"
    )
    own = {"AutoConfig": "modeling_planted.Config", "AutoModelForCausalLM": "modeling_planted.Model"}
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"auto_map": own}))
    return witness
