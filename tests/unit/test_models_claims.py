"""No tensor of a model directory is dropped without a word, and none that transformers writes is a fault."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from megarl.models.architecture import hf_shapes
from megarl.models.claims import weight_faults
from megarl.models.config import ModelSection
from megarl.models.hub import read_model
from megarl.models.source import Source
from tests.support.hollow import write_hollow, write_zeros
from tests.support.tiny import SIZES, VARIANTS, write_checkpoint, write_classifier

STRANGERS = {
    "bias of the attention": ("model.layers.1.self_attn.o_proj.bias", "attention_bias"),
    "bias of the feed-forward layer": ("model.layers.0.mlp.down_proj.bias", "mlp_bias"),
    "another layer": ("model.layers.7.input_layernorm.weight", "num_hidden_layers counts 2 layers"),
    "an expert": ("model.layers.1.mlp.experts.99.up_proj.weight", "the number of experts"),
    "a score": ("score.weight", "ForSequenceClassification"),
    "a value head": ("v_head.summary.weight", "model_type"),
    "a part of a layer": ("model.layers.0.self_attn.sinks", "model_type"),
}
UNCLAIMED = "which the model of its config.json does not have, and which would be dropped"


def faults(directory: Path, *, overrides: Mapping[str, Any] | None = None) -> list[str]:
    _, architecture = read_model(directory, overrides or {})
    return list(weight_faults(directory, architecture, needs_head=True))


def add(directory: Path, **tensors: torch.Tensor) -> None:
    file = directory / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_transformers_writes_is_claimed_and_nothing_else(variant: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", variant)
    assert faults(model) == []
    if VARIANTS[variant]["model_type"] in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        assert faults(write_classifier(tmp_path / "judge", variant)) == []
    sound = (model / "model.safetensors").read_bytes()
    own = load_file(model / "model.safetensors")
    for what, (name, claim) in STRANGERS.items():
        if name in own:
            continue
        add(model, **{name: torch.zeros(2)})
        [fault] = faults(model)
        assert fault.startswith(f"{model} holds {name}, {UNCLAIMED}"), what
        assert claim in fault, what
        (model / "model.safetensors").write_bytes(sound)
    add(
        model,
        **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16), "model.rotary_emb.inv_freq": torch.ones(16)},
    )
    assert faults(model) == []


def test_extra_tensors_in_shards_outside_index_are_faults(tmp_path: Path) -> None:
    write_hollow(tmp_path, SIZES | VARIANTS["llama"])
    (tmp_path / "model.safetensors").unlink()
    _, architecture = read_model(tmp_path, {})
    shapes = dict(hf_shapes(architecture))
    names = list(shapes)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, part in parts.items():
        write_zeros(tmp_path / file, {name: shapes[name] for name in part})
    assert faults(tmp_path) == []
    write_zeros(
        tmp_path / "b.safetensors", {name: shapes[name] for name in parts["b.safetensors"]} | {"extra.bias": (2,)}
    )
    assert "extra.bias" in faults(tmp_path)[0]


def test_many_tensors_are_counted_and_some_named(tmp_path: Path) -> None:
    write_hollow(tmp_path, SIZES | VARIANTS["llama"] | {"num_hidden_layers": 5})
    config = SIZES | VARIANTS["llama"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    [fault] = faults(tmp_path)
    assert "input_layernorm.weight, " in fault
    assert " and 24 more tensors, which the model" in fault
    assert "num_hidden_layers counts 2 layers" in fault


def test_layers_dropped_by_user_override_are_no_fault(tmp_path: Path) -> None:
    write_hollow(tmp_path, SIZES | VARIANTS["llama"] | {"num_hidden_layers": 5})
    assert faults(tmp_path, overrides={"num_hidden_layers": 2}) == []


def test_prediction_ahead_is_left_out_by_name(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen3_next")
    add(model, **{"mtp.fc.weight": torch.zeros(2, 2), "mtp.layers.0.input_layernorm.weight": torch.zeros(2)})
    assert faults(model) == []


def test_multi_token_prediction_layers_are_skipped_by_number(tmp_path: Path) -> None:
    config = SIZES | VARIANTS["deepseek_v3"]
    write_hollow(tmp_path, config | {"num_hidden_layers": 4})
    for ahead, num_faults in ((2, 0), (1, 1), (0, 1)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": ahead}))
        assert len(faults(tmp_path)) == num_faults
    assert "num_hidden_layers counts 2 layers" in faults(tmp_path)[0]


def test_missing_tensors_wrong_shapes_and_dtypes_are_named(tmp_path: Path) -> None:
    write_hollow(tmp_path, SIZES | VARIANTS["llama-tied"])
    (tmp_path / "config.json").write_text(json.dumps(SIZES | VARIANTS["llama"]))
    assert faults(tmp_path) == [
        f"{tmp_path} has no tensor lm_head.weight; if its output layer is the embedding, config.json must say "
        "tie_word_embeddings: true"
    ]
    (tmp_path / "config.json").write_text(json.dumps(SIZES | VARIANTS["llama-tied"] | {"vocab_size": 150}))
    file = tmp_path / "model.safetensors"
    assert faults(tmp_path) == [
        f"model.embed_tokens.weight in {file} has shape (211, 64); config.json says (150, 64)",
    ]
    write_checkpoint(tmp_path, "llama")
    add(tmp_path, **{"model.norm.weight": torch.ones(64, dtype=torch.int64)})
    assert faults(tmp_path) == [
        f"model.norm.weight in {file} is stored as I64; weights must be plain floats (F64, F32, F16, BF16)"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lm_head_beside_tied_embeddings_must_equal_embedding(tmp_path: Path, dtype: torch.dtype) -> None:
    model = write_checkpoint(tmp_path, "llama-tied")
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"].to(dtype)
    add(model, **{"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()})
    Source.read(ModelSection(path=str(model)))
    other = embedding.clone()
    other[-1, -1] += 1
    add(model, **{"lm_head.weight": other})
    with pytest.raises(ValueError, match="holds lm_head.weight, which differs from model.embed_tokens.weight"):
        Source.read(ModelSection(path=str(model)))


def test_source_refuses_weights_of_another_model(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama")
    add(model, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)})
    with pytest.raises(ValueError, match=r"holds model.layers.0.self_attn.q_proj.bias, .*attention_bias or qkv_bias"):
        Source.read(ModelSection(path=str(model)))


def test_a_tensor_that_is_there_twice_is_named(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama")
    file = model / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    entry = json.dumps({"model.norm.weight": json.loads(content[8:end])["model.norm.weight"] | {"dtype": "BF16"}})
    header = f"{entry[:-1]}, {content[9:end].decode()}".encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    load_file(file)  # safetensors accepts it
    [fault] = faults(model)
    assert fault == f"{file} cannot be read as safetensors: it lists model.norm.weight twice; write the file again"


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_tensor_in_two_files_is_named(is_listed: bool, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama")
    (model / "model.safetensors").rename(model / "first.safetensors")
    tensors = load_file(model / "first.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"], "other": torch.ones(1)}, model / "second.safetensors")
    index = {name: "first.safetensors" for name in tensors if is_listed or name != "model.norm.weight"}
    index["other"] = "second.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    [fault] = faults(model)
    assert fault.startswith(f"model.norm.weight is in {model}/first.safetensors and in {model}/second.safetensors")


def test_index_with_duplicate_tensor_is_named(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama")
    (model / "model.safetensors").rename(model / "first.safetensors")
    entries = ", ".join(f'"{name}": "first.safetensors"' for name in ["model.norm.weight", "model.norm.weight"])
    (model / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{entries}}}}}')
    [fault] = faults(model)
    assert "is no index of weights: it lists model.norm.weight twice" in fault
