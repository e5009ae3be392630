"""Tiny random models of images and text, as `transformers` writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tests.support.tiny import SIZES, VARIANTS, save_random

VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
SIGLIP = VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN = VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": ("gemma3", SIGLIP),
    "mistral": ("mistral3", SIGLIP | {"model_type": "pixtral", "head_dim": 16}),
    "ministral3": ("mistral3", SIGLIP | {"model_type": "pixtral", "head_dim": 16}),
    "qwen3_5_text": ("qwen3_5", QWEN),
    "qwen3_5_moe_text": ("qwen3_5_moe", QWEN),
}
"""Variant of the text model -> `model_type` of the whole model, and its `vision_config`."""


def write_wrapped(directory: Path, variant: str, **overrides: Any) -> Any:
    """Write a random float32 model of images and text, and return it. `overrides` are fields of its `config.json`."""
    model_type, vision = WRAPPED[variant]
    config = CONFIG_MAPPING[model_type](text_config=SIZES | VARIANTS[variant], vision_config=vision, **overrides)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    save_random(model, directory)
    return model


def change_files(directory: Path, tensors: Mapping[str, Tensor], *, without: str = "") -> None:
    """Add tensors to the file of a checkpoint, and remove those whose names contain `without`."""
    file = directory / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not without or without not in name}
    save_file(kept | {name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def stack_experts(directory: Path, model: Any) -> None:
    """Store the experts of Qwen3.5 as they were published: the matrices of all experts of a layer in two tensors."""
    stacked = {
        name: tensor.detach()
        for name, tensor in model.state_dict().items()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    change_files(directory, stacked, without=".experts.")


def change_config(directory: Path, changes: Mapping[str, Any], *, of_text: Mapping[str, Any]) -> None:
    """Change fields of the `config.json` of a checkpoint and of its `text_config`; None removes a field."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    config["text_config"] |= of_text
    config["text_config"] = {key: value for key, value in config["text_config"].items() if value is not None}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
