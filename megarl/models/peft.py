"""The files of PEFT: a directory with adapters has their weights and `adapter_config.json`."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megarl.models.architecture import Architecture
from megarl.models.config import ModelSection
from megarl.models.hub import local_directory, read_json
from megarl.models.lora import ALL_LINEAR, Lora, adapted_projections
from megarl.platform.errors import UserError
from megarl.platform.files import write_whole

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {  # field: its supported values, first that of a missing field
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "modules_to_save": (None, [], ["score"]),
}


def lora_of(section: ModelSection) -> Lora | None:
    """Return the adapters that a section asks for; None if the weights learn.

    Raises:
        UserError: `lora_adapter_path` names no adapters, unsupported ones, or those of another rank.
    """
    base = str(Path(section.path).resolve()) if Path(section.path).exists() else section.path
    if section.lora_adapter_path:
        directory = local_directory(section.lora_adapter_path, with_code=False)
        lora = replace(read_adapters(directory), base=base, start=directory)
        if section.lora_rank not in (0, lora.rank):
            raise UserError(
                f"lora_rank={section.lora_rank}, but the adapters in {directory} have rank {lora.rank}: leave lora_rank"
                " out, or write this rank"
            )
        return lora
    if not section.lora_rank:
        return None
    return Lora(
        rank=section.lora_rank,
        alpha=section.lora_alpha,
        targets=_names(section.target_modules),
        excluded=_names(section.exclude_modules),
        base=base,
    )


def read_adapters(directory: Path) -> Lora:
    """Return the adapters that the `adapter_config.json` of a directory describes.

    Raises:
        UserError: there is no such file, or a field asks for what megarl does not do.
    """
    path = directory / CONFIG
    if not path.is_file():
        raise UserError(f"{directory} has no {CONFIG}: name a directory that PEFT has written")
    config = read_json(path)
    for field, allowed in UNSUPPORTED.items():
        value = config.get(field, allowed[0])
        if value not in allowed:
            raise UserError(f"{path}: {field}={value!r} is not supported, only {' or '.join(map(repr, allowed))}")
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise UserError(f"{path}: r={rank!r}, lora_alpha={alpha!r}: adapters need a rank and a scale")
    return Lora(
        rank=rank,
        alpha=alpha * math.sqrt(rank) if config.get("use_rslora") else float(alpha),  # divides by the root of the rank
        targets=_names(config.get("target_modules") or ALL_LINEAR),
        excluded=_names(config.get("exclude_modules")),
        base=str(config.get("base_model_name_or_path") or ""),
    )


def write_adapter_config(directory: Path, lora: Lora, architecture: Architecture) -> None:
    """Write `adapter_config.json`."""
    scores = architecture.scalar_head
    content = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scores else "CAUSAL_LM",
        "base_model_name_or_path": lora.base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": adapted_projections(architecture, lora),
        "modules_to_save": ["score"] if scores else None,
        "bias": "none",
        "inference_mode": True,
    }
    write_whole(directory / CONFIG, json.dumps(content, indent=2).encode())


def _names(value: str | list[str] | None) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(value or ())
