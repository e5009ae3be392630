"""Checkpoints in FP8 or MXFP4, and the weights that they stand for."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def config_of(block: Sequence[int]) -> dict[str, Any]:
    """Return the `quantization_config` of a published checkpoint."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head"],
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }


def by_block(scales: Tensor, shape: tuple[int, int], block: Sequence[int]) -> Tensor:
    """Return the scale of each element of a matrix."""
    rows, columns = (torch.arange(size) // step for size, step in zip(shape, block, strict=True))
    return scales.float()[rows[:, None], columns[None, :]]


def dequantised(numbers: Tensor, scales: Tensor, block: Sequence[int]) -> Tensor:
    """Return a full matrix in float32."""
    rows, columns = numbers.shape
    return numbers.float() * by_block(scales, (rows, columns), block)


def quantised(matrix: Tensor, block: Sequence[int], *, scale_dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the FP8 numbers of a matrix and the scales of its blocks; the largest number of a block is the limit."""
    grid = [-(-size // step) for size, step in zip(matrix.shape, block, strict=True)]
    scales = torch.zeros(grid)
    for row in range(grid[0]):
        for column in range(grid[1]):
            part = matrix[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            scales[row, column] = part.abs().max() / LARGEST
    scales = scales.to(scale_dtype)
    rows, columns = matrix.shape
    return [(matrix / by_block(scales, (rows, columns), block)).to(torch.float8_e4m3fn), scales]


def quantise(
    directory: Path, block: Sequence[int] = (32, 32), *, scale_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Store the matrices of a checkpoint's layers in FP8, as published ones are; return the weights in float32."""
    file = directory / "model.safetensors"
    stored = dict[str, Tensor]()
    weights = dict[str, Tensor]()
    for name, tensor in load_file(file).items():
        if name.endswith("_proj.weight"):
            stored[name], scales = quantised(tensor, block, scale_dtype=scale_dtype)
            stored[f"{name}_scale_inv"] = scales
            weights[name] = dequantised(stored[name], scales, block)
        else:
            stored[name] = weights[name] = tensor
    save_file(stored, file, metadata={"format": "pt"})
    add_to_config(directory, {"quantization_config": config_of(block)})
    return weights


def compressed_config(**of_weights: Any) -> dict[str, Any]:
    """Return the `quantization_config` that compressed-tensors writes for FP8 with a scale for each row.

    `of_weights` are changes of the weights' scheme.
    """
    common = {"actorder": None, "group_size": None, "num_bits": 8, "symmetric": True, "type": "float"}
    weights = common | {"block_structure": None, "dynamic": False, "observer": "minmax", "strategy": "channel"}
    group = {
        "input_activations": common | {"dynamic": True, "observer": None, "strategy": "token"},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights | of_weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def compress(directory: Path, *, scale_dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Store the matrices of a checkpoint's layers in FP8 with a scale for each row, as GLM's are published.

    Return the weights in float32.
    """
    file = directory / "model.safetensors"
    stored = dict[str, Tensor]()
    weights = dict[str, Tensor]()
    for name, tensor in load_file(file).items():
        if name.endswith("_proj.weight"):
            row = 1, tensor.shape[1]
            stored[name], stored[f"{name}_scale"] = quantised(tensor, row, scale_dtype=scale_dtype)
            weights[name] = dequantised(stored[name], stored[f"{name}_scale"], row)
        else:
            stored[name] = weights[name] = tensor
    save_file(stored, file, metadata={"format": "pt"})
    add_to_config(directory, {"quantization_config": compressed_config()})
    return weights


def add_to_config(directory: Path, fields: Mapping[str, Any]) -> None:
    """Replace fields of a `config.json`."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def quantise_experts(directory: Path, *, seed: int = 0) -> dict[str, Tensor]:
    """Store random experts of gpt-oss in MXFP4, as published ones are; return the weights in float32."""
    file = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    stored = load_file(file)
    weights = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        shape = experts, rows, columns // 32, 16
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 124, shape[:3], dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales).float()
    save_file(stored, file, metadata={"format": "pt"})
    add_to_config(directory, {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}})
    return weights


class CountedSlice:
    """A lazy slice of a file that adds up the elements that are read."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.num_read = 0
        self.largest = 0

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        found = self._tensor[index]
        self.num_read += found.numel()
        self.largest = max(self.largest, found.numel())
        return found
