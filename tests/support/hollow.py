"""Checkpoints whose headers name every tensor, and whose zeros take no room on the disk."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.models.architecture import hf_shapes, read_architecture


def write_hollow(directory: Path, config: Mapping[str, Any]) -> Path:
    """Write `config.json` and a sparse bfloat16 `model.safetensors` of the shapes that it describes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_zeros(directory / "model.safetensors", hf_shapes(read_architecture(config)))
    return directory


def write_zeros(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a sparse safetensors file of bfloat16 tensors."""
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    encoded = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(encoded).to_bytes(8, "little") + encoded)
        opened.truncate(8 + len(encoded) + end)
