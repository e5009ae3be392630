"""What can be known of a model before any library is imported: whether its files are there, and its sizes."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.config.faults import Fault
from megarl.learner.config import ModelSection

_HF_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The numbers of a HF config that a partition has to divide."""

    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    ffn_hidden_size: int
    max_position_embeddings: int | None


def read_sizes(model: ModelSection) -> ModelSizes | None:
    """Return the sizes of a local model with `override_config` applied; None where they cannot be known yet."""
    try:
        config = json.loads((Path(model.path) / "config.json").read_text())
        config = {**config, **model.override_config}
        heads = int(config["num_attention_heads"])
        return ModelSizes(
            num_layers=int(config["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            ffn_hidden_size=int(config["intermediate_size"]),
            max_position_embeddings=config.get("max_position_embeddings"),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None  # `model_faults` says what is wrong with a local directory


def model_faults(model: ModelSection, key: str) -> Iterator[Fault]:
    """Yield what is missing of the model that `key` names; a HF id is left to the hub."""
    directory = Path(model.path)
    if not model.path:
        return
    if not directory.exists():
        if not _HF_ID.fullmatch(model.path) or model.path.startswith("."):
            yield Fault(path=key, message=f"no directory {model.path}: give a HF directory or a HF id (org/name)")
    elif not (directory / "config.json").is_file():
        yield Fault(path=key, message=f"{model.path} has no config.json: give a directory in Hugging Face's format")
    elif not any(directory.glob("*.safetensors")):
        remedy = "convert them with transformers' save_pretrained" if any(directory.glob("*.bin")) else "add them"
        yield Fault(path=key, message=f"{model.path} has no weights (*.safetensors): {remedy}")
    elif read_sizes(model) is None:
        yield Fault(
            path=key,
            message=f"{model.path}/config.json is not that of a causal language model: it must be JSON with "
            "num_hidden_layers, num_attention_heads and intermediate_size",
        )
