"""Checkpoints of compressed-tensors in FP8 are read as that package dequantises them, by slices; others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megarl.models.architecture import hf_shapes, read_architecture
from megarl.models.claims import weight_faults
from megarl.models.config import ModelSection
from megarl.models.hub import read_model
from megarl.models.source import Source
from megarl.reshard.files import CheckpointFiles
from megarl.reshard.layout import Box, Piece, row_major
from megarl.reshard.quantised import Block
from megarl.reshard.stored import ROWS, Fp8Matrix
from tests.support.layouts import blank, filled, slices, trainer_layouts
from tests.support.quantised import CountedSlice, compress, compressed_config
from tests.support.tiny import SIZES, VARIANTS, write_checkpoint

GATE = "model.layers.0.mlp.gate_proj.weight"
DTYPES = [torch.float32, torch.bfloat16]


def read(directory: Path, box: Box, dtype: torch.dtype) -> torch.Tensor:
    local = torch.zeros(box.shape, dtype=dtype)
    CheckpointFiles(directory).load([Piece("w.weight", box, "local", 0, row_major(box.shape), dtype)], {"local": local})
    return local


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_equals_that_of_compressed_tensors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.getbasetemp() / "boxes"
    directory.mkdir(exist_ok=True)
    block = data.draw(st.one_of(st.none(), st.tuples(st.integers(2, 9), st.integers(2, 9))))
    grid = data.draw(st.tuples(st.integers(2, 6), st.integers(2, 6)))
    shape = (grid[0] * block[0], grid[1] * block[1]) if block else data.draw(st.tuples(*[st.integers(1, 50)] * 2))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    numbers = torch.randn(shape).to(torch.float8_e4m3fn)
    dtype = data.draw(st.sampled_from(DTYPES))
    scales = torch.rand(grid if block else (shape[0], 1)).to(dtype)
    save_file({"w.weight": numbers, "w.weight_scale": scales}, directory / "model.safetensors")
    scheme = {"strategy": "block", "block_structure": list(block)} if block else {}
    (directory / "config.json").write_text(json.dumps({"quantization_config": compressed_config(**scheme)}))
    lo = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = Box(lo, tuple(data.draw(st.integers(low + 1, size)) for low, size in zip(lo, shape, strict=True)))
    assert torch.equal(read(directory, box, dtype), dequantize(numbers, scales)[slices(box)])


def test_only_the_box_and_its_scales_are_read() -> None:
    numbers = CountedSlice(torch.ones(3000, 20).to(torch.float8_e4m3fn))
    scales = CountedSlice(torch.ones(3000, 1))
    box = Box((100, 3), (2900, 11))
    parts = list(Fp8Matrix(numbers, scales, Block(1, None)).read(box))
    assert [part.shape[0] for part, _ in parts] == [ROWS, ROWS, 2800 - 2 * ROWS]
    assert (numbers.num_read, scales.num_read) == (box.numel, 2800)


@pytest.mark.parametrize("split", [{"tp": 1, "pp": 1}, {"tp": 2, "pp": 2}])
@pytest.mark.parametrize("variant", ["glm4_moe", "llama"])
def test_every_rank_dequantises_its_own_slices(variant: str, split: dict[str, int], tmp_path: Path) -> None:
    weights = compress(write_checkpoint(tmp_path, variant), scale_dtype=torch.float32)
    source = Source.read(ModelSection(path=str(tmp_path)))
    assert "quantization_config" not in source.hf_config
    assert set(CheckpointFiles(tmp_path).names) == weights.keys()
    for layout in trainer_layouts(source.architecture, **split):
        tensors = blank(layout)
        CheckpointFiles(tmp_path).load(layout, tensors, shapes=hf_shapes(source.architecture))
        for param, expected in filled(layout, weights).items():
            assert torch.equal(tensors[param].nan_to_num(-1), expected.nan_to_num(-1)), param


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, f"{GATE} in FILE is stored as F8_E4M3, and its scales {GATE}_scale are missing"),
        (torch.ones(96), f"{GATE}_scale in FILE has shape (96,); blocks of 1 x all of {GATE} (96, 64) have (96, 1)"),
        (torch.ones(1), f"{GATE}_scale in FILE has shape (1,)"),
        (torch.ones(96, 1).double(), f"{GATE}_scale in FILE is stored as F64"),
    ],
)
def test_damaged_scales_are_named_with_file(tmp_path: Path, scales: torch.Tensor | None, message: str) -> None:
    file = tmp_path / "model.safetensors"
    compress(write_checkpoint(tmp_path, "llama"))
    tensors = load_file(file)
    del tensors[f"{GATE}_scale"]
    save_file(tensors | ({} if scales is None else {f"{GATE}_scale": scales}), file)
    [fault] = weight_faults(tmp_path, read_model(tmp_path, {})[1], needs_head=True)
    assert message.replace("FILE", str(file)) in fault


def test_scales_of_activations_are_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    compress(write_checkpoint(tmp_path, "llama"))
    save_file(load_file(file) | {"model.layers.0.mlp.gate_proj.input_scale": torch.ones(1)}, file)
    [fault] = weight_faults(tmp_path, read_model(tmp_path, {})[1], needs_head=True)
    assert "gate_proj.input_scale, which the model of its config.json does not have" in fault


def of_group(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": compressed_config()["config_groups"]["group_0"] | changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (compressed_config(num_bits=4), r"config_groups\.group_0\.weights\.num_bits 4: must be 8"),
        (compressed_config(type="int"), r"weights\.type 'int': must be 'float'"),
        (compressed_config(strategy="tensor"), r"weights\.strategy 'tensor': must be 'channel' or 'block'"),
        (compressed_config(strategy="group", group_size=32), r"weights\.strategy 'group'"),
        (compressed_config(symmetric=False), r"weights\.symmetric False"),
        (compressed_config(strategy="block"), r"weights\.block_structure None: must be rows and columns"),
        (of_group(input_activations={"dynamic": False}), r"input_activations\.dynamic False: must be True"),
        (of_group(output_activations={}), r"output_activations {}: must be None"),
        (of_group(weights=None), r"config_groups\.group_0 .*: must say how weights are stored"),
        ({"config_groups": {}}, "config_groups {}: must be an object of groups"),
        (
            {
                "config_groups": {
                    "one": compressed_config()["config_groups"]["group_0"],
                    "two": compressed_config(strategy="block", block_structure=[8, 8])["config_groups"]["group_0"],
                }
            },
            "config_groups: all groups must have scales of the same parts",
        ),
        ({"format": "pack-quantized"}, "format 'pack-quantized': must be 'float-quantized'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"transform_config": {"config_groups": {"rotation": {}}}}, "transform_config"),
        ({"new_key": 1}, "new_key is not known here; start from the bf16 checkpoint"),
    ],
)
def test_other_schemes_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    plain = SIZES | VARIANTS["glm4_moe"]
    with pytest.raises(ValueError, match=message):
        read_architecture(plain | {"quantization_config": compressed_config() | changes})


def test_configuration_is_that_of_the_package() -> None:
    plain = SIZES | VARIANTS["glm4_moe"]
    declared = compressed_config()
    QuantizationConfig.model_validate(declared)
    assert read_architecture(plain | {"quantization_config": declared}) == read_architecture(plain)
