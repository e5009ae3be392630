"""Checkpoints in FP8 blocks read as transformers dequantises them, by slices, and damaged ones are faults."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from megarl.models.architecture import hf_shapes, read_architecture
from megarl.models.claims import weight_faults
from megarl.models.config import ModelSection
from megarl.models.hub import read_model
from megarl.models.overrides import unread_overrides
from megarl.models.source import Source
from megarl.reshard.files import CheckpointFiles
from megarl.reshard.layout import Box, Piece, row_major, whole
from megarl.reshard.quantised import Block
from megarl.reshard.stored import Fp8Matrix
from tests.support.layouts import blank, filled, slices, trainer_layouts
from tests.support.quantised import CountedSlice, add_to_config, config_of, dequantised, quantise
from tests.support.tiny import SIZES, VARIANTS, write_checkpoint

GATE = "model.layers.0.mlp.gate_proj.weight"
SCALES = f"{GATE}_scale_inv"
DTYPES = [torch.float32, torch.bfloat16]


def read(directory: Path, name: str, box: Box, dtype: torch.dtype) -> Tensor:
    local = torch.zeros(box.shape, dtype=dtype)
    CheckpointFiles(directory).load([Piece(name, box, "local", 0, row_major(box.shape), dtype)], {"local": local})
    return local


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, int]) -> Box:
    lo = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(lo, tuple(draw(st.integers(low + 1, size)) for low, size in zip(lo, shape, strict=True)))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_box_equals_slice_of_full_matrix(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.getbasetemp() / "boxes"
    directory.mkdir(exist_ok=True)
    block = data.draw(st.tuples(st.integers(1, 130), st.integers(1, 130)))
    shape = data.draw(st.tuples(st.integers(1, 300), st.integers(1, 300)))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    every_byte = torch.randint(0, 256, shape, dtype=torch.uint8)
    numbers = every_byte.where(every_byte & 0x7F != 0x7F, 0).view(torch.float8_e4m3fn)  # without NaN
    scales = torch.rand([-(-size // step) for size, step in zip(shape, block, strict=True)]).mul(0.01)
    scales = scales.to(data.draw(st.sampled_from(DTYPES)))
    save_file({"w.weight": numbers, "w.weight_scale_inv": scales}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": config_of(block)}))
    dtype = data.draw(st.sampled_from(DTYPES))
    full = dequantised(numbers, scales, block)
    box = data.draw(boxes(shape))
    assert torch.equal(read(directory, "w.weight", box, dtype), full[slices(box)].to(dtype))
    if all(size % step == 0 for size, step in zip(shape, block, strict=True)):
        oracle = Fp8Dequantize(None)._dequantize_one(numbers, scales, output_dtype=dtype)
        assert torch.equal(full.to(dtype), oracle)


@given(box=boxes((300, 200)))
def test_only_the_box_and_its_scales_are_read(box: Box) -> None:
    numbers = CountedSlice(torch.ones(300, 200).to(torch.float8_e4m3fn))
    scales = CountedSlice(torch.ones(5, 5))
    parts = list(Fp8Matrix(numbers, scales, Block(64, 48)).read(box))
    assert numbers.num_read == box.numel == sum(values.numel() for _, values in parts)
    assert numbers.largest <= 64 * box.shape[1]  # rows of one block at a time
    touched = [-(-high // step) - low // step for low, high, step in zip(box.lo, box.hi, (64, 48), strict=True)]
    assert scales.num_read == touched[0] * touched[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_weights_equal_those_that_transformers_dequantises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    # It asks for a GPU and a package that only the layers in FP8 need.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    quantise(write_checkpoint(tmp_path, "qwen3"), scale_dtype=scale_dtype)
    dequantised_at_load = FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=dequantised_at_load, dtype=dtype)
    oracle = model.state_dict()
    assert oracle.keys() == set(CheckpointFiles(tmp_path).names)
    for name, expected in oracle.items():
        assert expected.dtype == dtype
        assert torch.equal(read(tmp_path, name, whole(tuple(expected.shape)), dtype), expected), name


@pytest.mark.parametrize("block", [(32, 32), (48, 40)])
@pytest.mark.parametrize("split", [{"tp": 1, "pp": 1}, {"tp": 2, "pp": 2}, {"tp": 4, "pp": 1}])
@pytest.mark.parametrize("variant", ["llama", "qwen3_moe", "deepseek_v3"])
def test_every_rank_dequantises_its_own_slices(
    variant: str, split: dict[str, int], block: tuple[int, int], tmp_path: Path
) -> None:
    sizes = {"num_key_value_heads": 4}  # of four ranks each has one
    weights = quantise(write_checkpoint(tmp_path, variant, **sizes), block)
    model = read_architecture(json.loads((tmp_path / "config.json").read_text()))
    for layout in trainer_layouts(model, **split):
        tensors = blank(layout)
        CheckpointFiles(tmp_path).load(layout, tensors, shapes=hf_shapes(model))
        for param, expected in filled(layout, weights).items():
            assert torch.equal(tensors[param].nan_to_num(-1), expected.nan_to_num(-1)), param


def test_scales_may_be_in_another_file(tmp_path: Path) -> None:
    weights = quantise(write_checkpoint(tmp_path, "llama"))
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    file_of = {name: f"{'b' if name.endswith('_inv') else 'a'}.safetensors" for name in stored}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: tensor for name, tensor in stored.items() if file_of[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    assert faults(tmp_path) == []
    files = CheckpointFiles(tmp_path)
    layout = files.layout()
    assert {piece.name: (piece.box, piece.dtype) for piece in layout} == {
        name: (whole(tuple(tensor.shape)), torch.float32) for name, tensor in weights.items()
    }
    tensors = blank(layout)
    files.load(layout, tensors)
    assert all(torch.equal(tensors[name].view(tensor.shape), tensor) for name, tensor in weights.items())


def test_equal_numbers_of_fp8_and_float_matrices(tmp_path: Path) -> None:
    quantise(write_checkpoint(tmp_path, "llama"))
    tensors = load_file(tmp_path / "model.safetensors")
    plain = dequantised(tensors[GATE], tensors[SCALES], (32, 32))
    save_file(tensors | {"plain": plain, "other": plain + plain.eq(plain[-1, -1])}, tmp_path / "model.safetensors")
    files = CheckpointFiles(tmp_path)
    assert files.are_equal(GATE, "plain", range(SIZES["intermediate_size"]))
    assert files.are_equal(GATE, "other", range(40, 50))
    assert not files.are_equal(GATE, "other", range(SIZES["intermediate_size"]))


def faults(directory: Path) -> list[str]:
    _, architecture = read_model(directory, {})
    return list(weight_faults(directory, architecture, needs_head=True))


def replaced(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    """Replace a tensor of a checkpoint by another one; None removes it."""

    def replace(tensors: dict[str, Tensor]) -> None:
        new = change(tensors.pop(name))
        tensors |= {} if new is None else {name: new}

    return replace


@pytest.mark.parametrize(
    ("damage", "message", "is_read"),
    [
        (replaced(SCALES, lambda _: None), f"{GATE} in FILE is stored as F8_E4M3, and its scales {SCALES} are", False),
        (replaced(SCALES, lambda scales: scales[:-1]), f"{SCALES} in FILE has shape (2, 2); blocks of 32 x 32", False),
        (replaced(SCALES, lambda scales: scales.T.contiguous()), f"{SCALES} in FILE has shape (2, 3)", False),
        (replaced(SCALES, lambda scales: scales[0, 0]), f"{SCALES} in FILE has shape ()", False),
        (replaced(SCALES, lambda scales: scales.double()), f"{SCALES} in FILE is stored as F64; scales must be", False),
        (replaced(SCALES, lambda scales: scales.to(torch.uint8)), f"{SCALES} in FILE is stored as U8", False),
        (replaced(GATE, lambda gate: gate.bfloat16()), f"{SCALES} in FILE has the scales of {GATE}, which is", True),
        (replaced(GATE, lambda gate: gate.to(torch.float8_e5m2)), f"{GATE} in FILE is stored as F8_E5M2", False),
        (replaced(GATE, lambda gate: gate.view(torch.uint8)), f"{GATE} in FILE is stored as U8", False),
        (replaced(GATE, lambda _: None), "has no tensor", False),
        (
            replaced("model.norm.weight", lambda norm: norm.to(torch.float8_e4m3fn)),
            "model.norm.weight in FILE is stored as F8_E4M3 with shape (64,); only matrices have blocks",
            False,
        ),
        (
            lambda tensors: tensors.update({"lost.weight_scale_inv": torch.ones(2, 3)}),
            "lost.weight_scale_inv in FILE has the scales of lost.weight, which is missing",
            True,
        ),
    ],
)
def test_damaged_blocks_are_named_with_file(
    tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], message: str, is_read: bool
) -> None:
    file = tmp_path / "model.safetensors"
    weights = quantise(write_checkpoint(tmp_path, "llama"))
    assert faults(tmp_path) == []
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)
    found = faults(tmp_path)
    assert any(message.replace("FILE", str(file)) in fault for fault in found), found
    layout = [
        Piece(name, whole(tuple(tensor.shape)), name, 0, row_major(tuple(tensor.shape)), torch.float32)
        for name, tensor in weights.items()
    ]
    if not is_read:
        with pytest.raises(ValueError, match=r"stored as|has shape|no tensor"):
            CheckpointFiles(tmp_path).load(layout, blank(layout))


def test_many_damaged_blocks_are_counted(tmp_path: Path) -> None:
    quantise(write_checkpoint(tmp_path, "llama"))
    add_to_config(tmp_path, {"quantization_config": config_of((16, 32))})
    [fault] = faults(tmp_path)
    assert fault.endswith("(and 13 more tensors do not fit)")


def test_fp8_without_declared_blocks_is_a_fault(tmp_path: Path) -> None:
    quantise(write_checkpoint(tmp_path, "llama"))
    add_to_config(tmp_path, {"quantization_config": None})
    found = faults(tmp_path)
    assert "is stored as F8_E4M3; weights must be plain floats" in found[0]
    with pytest.raises(ValueError, match="is stored as F8_E4M3, and config.json has no quantization_config"):
        CheckpointFiles(tmp_path).layout()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json cannot be read as JSON"):
        CheckpointFiles(tmp_path).layout()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "'gptq': must be 'fp8' or 'compressed-tensors'; start from the bf16 checkpoint"),
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ({"quant_method": ["fp8"]}, "quant_method"),
        ({"activation_scheme": "static"}, "activation_scheme 'static': must be 'dynamic'"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"scale_fmt": "other"}, "scale_fmt 'other'"),
        ({"weight_block_size": None}, r"weight_block_size None: must be rows and columns"),
        ({"weight_block_size": [128]}, "weight_block_size"),
        ({"weight_block_size": [128, 0]}, "weight_block_size"),
        ({"weight_block_size": [128, True]}, "weight_block_size"),
        ({"weight_block_size": [128.0, 128]}, "weight_block_size"),
        ({"weight_block_size": "128"}, "weight_block_size"),
        ({"kv_cache_scheme": {}}, "kv_cache_scheme is not known here"),
    ],
)
def test_other_quantisations_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    config = SIZES | VARIANTS["llama"]
    with pytest.raises(ValueError, match=message):
        read_architecture(config | {"quantization_config": config_of((128, 128)) | change})


@pytest.mark.parametrize("declared", ["fp8", [], 3])
def test_a_quantisation_that_is_no_object_is_refused(declared: Any) -> None:
    with pytest.raises(ValueError, match="quantization_config is no object"):
        read_architecture(SIZES | VARIANTS["llama"] | {"quantization_config": declared})


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"scale_fmt": "ue8m0"},
        {"ignored_layers": ["lm_head"], "fmt": "float8_e4m3fn"},
        {"dequantize": False, "modules_to_convert": None},
    ],
)
def test_published_quantisations_are_read(more: dict[str, Any]) -> None:
    plain = SIZES | VARIANTS["llama"]
    read_as = read_architecture(plain | {"quantization_config": config_of((128, 128)) | more})
    assert read_as == read_architecture(plain | {"quantization_config": None})


def test_quantisation_cannot_be_overridden() -> None:
    plain = SIZES | VARIANTS["llama"]
    own = plain | {"quantization_config": config_of((128, 128))}
    for other in (None, config_of((64, 64))):
        found = list(unread_overrides(own, {"quantization_config": other}))
        assert found == ["quantization_config describes the files, and cannot be overridden: leave it out"]
    assert len(list(unread_overrides(plain, {"quantization_config": config_of((64, 64))}))) == 1


def test_exported_config_has_no_quantisation(tmp_path: Path) -> None:
    quantise(write_checkpoint(tmp_path, "llama"))
    source = Source.read(ModelSection(path=str(tmp_path)))
    assert "quantization_config" not in source.hf_config
    assert source.hf_config["vocab_size"] == SIZES["vocab_size"]
