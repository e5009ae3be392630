"""Experts in MXFP4 read as transformers dequantises them, by slices, and damaged ones are faults."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.models.architecture import hf_shapes, read_architecture
from megarl.models.claims import weight_faults
from megarl.models.hub import read_model
from megarl.platform.errors import UserError
from megarl.reshard.files import CheckpointFiles
from megarl.reshard.layout import Box, whole
from megarl.reshard.stored import ROWS, Mxfp4Experts
from tests.support.layouts import blank, filled, slices, trainer_layouts
from tests.support.quantised import CountedSlice, add_to_config, quantise_experts
from tests.support.tiny import SIZES, VARIANTS, write_checkpoint

DOWN = "model.layers.0.mlp.experts.down_proj"


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    lo = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(lo, tuple(draw(st.integers(low + 1, size)) for low, size in zip(lo, shape, strict=True)))


@given(box=boxes((3, 160, 7)), seed=st.integers(0, 99))
def test_any_box_equals_slice_of_full_matrices(box: Box, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (3, 7, 5, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (3, 7, 5), dtype=torch.uint8, generator=generator)
    full = convert_moe_packed_tensors(blocks, scales)
    parts = [CountedSlice(blocks), CountedSlice(scales)]
    found = torch.full(full.shape, -1.0, dtype=torch.bfloat16)
    for part, numbers in Mxfp4Experts(*parts).read(box):
        found[slices(part)] = numbers
    same_bits = found[slices(box)].view(torch.int16) == full[slices(box)].contiguous().view(torch.int16)
    assert (same_bits | full[slices(box)].isnan()).all()
    touched = -(-box.hi[1] // 32) - box.lo[1] // 32
    assert parts[0].num_read == 16 * parts[1].num_read == 16 * touched * box.shape[0] * box.shape[2]


def test_large_matrices_are_read_in_rows() -> None:
    blocks, scales = (
        CountedSlice(torch.zeros(2, 3 * ROWS, 1, 16, dtype=torch.uint8)),
        CountedSlice(torch.zeros(2, 3 * ROWS, 1, dtype=torch.uint8)),
    )
    parts = list(Mxfp4Experts(blocks, scales).read(whole((2, 32, 3 * ROWS))))
    assert (len(parts), blocks.largest) == (6, 16 * ROWS)


@pytest.mark.parametrize("split", [{"tp": 1, "pp": 1}, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}])
def test_every_rank_dequantises_its_own_slices(split: dict[str, int], tmp_path: Path) -> None:
    weights = quantise_experts(write_checkpoint(tmp_path, "gpt_oss"))
    model = read_architecture(json.loads((tmp_path / "config.json").read_text()))
    files = CheckpointFiles(tmp_path)
    assert sorted(files.names) == sorted(hf_shapes(model))
    assert {piece.name: piece.box.shape for piece in files.layout()} == hf_shapes(model)
    for layout in trainer_layouts(model, **split):
        tensors = blank(layout)
        files.load(layout, tensors, shapes=hf_shapes(model))
        for param, tensor in filled(layout, weights).items():
            assert torch.equal(tensors[param].nan_to_num(-1), tensor.nan_to_num(-1)), param


def faults(directory: Path) -> list[str]:
    _, architecture = read_model(directory, {})
    return list(weight_faults(directory, architecture, needs_head=True))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("blocks", lambda blocks: blocks[..., :8], "is stored as U8 with shape (4, 64, 2, 8); it must be U8, 16 bytes"),
        ("blocks", lambda blocks: blocks.float(), "is stored as F32 with shape"),
        ("scales", lambda scales: scales[:, 1:], "it must be U8 with shape (4, 64, 2)"),
        ("scales", lambda scales: None, f"has no scales {DOWN}_scales"),
        ("blocks", lambda blocks: None, f"has no tensor {DOWN}"),
    ],
)
def test_damaged_matrices_are_named(
    tmp_path: Path, name: str, change: Callable[[Tensor], Tensor | None], message: str
) -> None:
    quantise_experts(write_checkpoint(tmp_path, "gpt_oss"))
    assert faults(tmp_path) == []
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors.pop(f"{DOWN}_{name}"))
    save_file(tensors if changed is None else tensors | {f"{DOWN}_{name}": changed.contiguous()}, file)
    assert any(message in fault for fault in faults(tmp_path)), faults(tmp_path)
    model = read_architecture(json.loads((tmp_path / "config.json").read_text()))
    [layout] = trainer_layouts(model, tp=1, pp=1)
    with pytest.raises(UserError):
        CheckpointFiles(tmp_path).load(layout, blank(layout), shapes=hf_shapes(model))


def test_undeclared_matrices_are_a_fault(tmp_path: Path) -> None:
    quantise_experts(write_checkpoint(tmp_path, "gpt_oss"))
    add_to_config(tmp_path, {"quantization_config": None})
    assert f"{DOWN}_blocks" in " ".join(faults(tmp_path))


@pytest.mark.parametrize(
    ("variant", "declared", "message"),
    [
        ("llama", {"quant_method": "mxfp4"}, "quant_method 'mxfp4': must be 'fp8'"),
        ("gpt_oss", {"quant_method": "awq"}, "quant_method 'awq': must be 'fp8' or 'compressed-tensors' or 'mxfp4'"),
        ("gpt_oss", {"quant_method": "mxfp4", "group_size": 16}, "group_size is not known here"),
    ],
)
def test_other_forms_are_refused_by_name(variant: str, declared: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_architecture(SIZES | VARIANTS[variant] | {"quantization_config": declared})
