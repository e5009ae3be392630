"""A small random mixture of experts that reads the tokens of the quickstart's model."""

import json
import shutil
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS = {
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
}
"""The sizes of a Qwen3 of experts that has about as many active weights as the quickstart's model."""


def write_experts(directory: Path, like: Path, seed: int) -> None:
    """Write a random mixture of experts with the tokens of the model `like`."""
    tokens = json.loads((like / "config.json").read_text(encoding="utf-8"))
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, **{name: tokens[name] for name in names})).save_pretrained(directory)
    shutil.copy(like / "tokenizer.model", directory)
