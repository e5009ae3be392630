"""Any content of a model's files is read as it was written, or is a fault that names the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.config.model_files import model_faults
from megarl.models.architecture import hf_shapes
from megarl.models.claims import weight_faults
from megarl.models.config import ModelSection
from megarl.models.hub import read_model
from megarl.reshard.headers import stored_tensors
from tests.support.hollow import write_hollow, write_zeros
from tests.support.tiny import SIZES, VARIANTS

LLAMA = SIZES | VARIANTS["llama"]
ODD_VALUES = st.one_of(
    st.none() | st.booleans() | st.text(max_size=5),
    st.integers(-3, 300) | st.integers(10**15, 10**30) | st.sampled_from([10**18, -1, 0, 10**400]),
    st.floats(),
    st.lists(st.integers(-2, 3), max_size=3),
    st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "rope_theta", "0"]), st.integers(-1, 9), max_size=3
    ),
    st.sampled_from([["LlamaForSequenceClassification"], {"rope_type": "yarn"}, {"type": "llama3", "factor": "8"}]),
)
KEYS = sorted(
    {key for variant in VARIANTS.values() for key in (*SIZES, *variant)}
    | {"rope_scaling", "rope_parameters", "rope_theta", "id2label", "num_labels", "architectures", "torch_dtype"}
    | {"layer_types", "use_sliding_window", "routed_scaling_factor", "n_shared_experts", "partial_rotary_factor"}
    | {"attention_bias", "hidden_act", "qkv_bias", "moe_layer_freq", "rope_interleave", "decoder_sparse_step"}
)


def faults(directory: Path) -> str:
    """Return the faults of a policy's model, from the check of the configuration."""
    found = list(model_faults(ModelSection(path=str(directory)), "actor_rollout_ref.model.path"))
    assert {fault.path for fault in found} <= {"actor_rollout_ref.model.path"}
    return "\n".join(fault.message for fault in found)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hollow(tmp_path_factory.mktemp("model"), LLAMA)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    variant=st.sampled_from(sorted(VARIANTS)), changes=st.dictionaries(st.sampled_from(KEYS), ODD_VALUES, max_size=3)
)
def test_any_config_value_gives_valid_sizes_or_fault(
    tmp_path_factory: pytest.TempPathFactory, variant: str, changes: dict[str, Any]
) -> None:
    directory = tmp_path_factory.getbasetemp() / "values"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SIZES | VARIANTS[variant] | changes))
    try:
        _, architecture = read_model(directory, {})
    except ValueError as error:
        assert str(error).startswith(f"{directory}/config.json"), error
        assert len(str(error)) < 1000
    else:
        assert all(size > 0 for shape in hf_shapes(architecture).values() for size in shape)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("hidden_size", "vocab_size") for value in (0, -1, 10**18, 1e18, "64", True, [64])),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("rms_norm_eps", -1e-6),
        ("rope_theta", float("inf")),
        ("tie_word_embeddings", "false"),
        ("torch_dtype", "float1"),
        ("eos_token_id", 99999),
        ("eos_token_id", [2, 99999]),
        ("head_dim", 33),
    ],
)
def test_impossible_value_is_named_with_its_key(tmp_path: Path, key: str, value: Any) -> None:
    write_hollow(tmp_path, LLAMA)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {key: value}))
    message = faults(tmp_path)
    assert message.startswith(f"{tmp_path}/config.json: {key} {str(value)[:4]}") or repr(value) in message, message


def test_heads_that_do_not_divide_are_named(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "head_dim"} | {"num_attention_heads": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "hidden_size 64 does not divide by num_attention_heads 6, and there is no head_dim" in faults(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"\xff\xfe",
        b'{"model_type": NaN}',
        b'"\\ud800"',
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_is_none_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    write_hollow(tmp_path, LLAMA)
    (tmp_path / name).write_bytes(content)
    if content == b'{"model_type": NaN}' and name != "config.json":
        assert not faults(tmp_path)
    else:
        assert f"{tmp_path}/{name}" in faults(tmp_path)


def test_generation_must_end_with_tokens_of_the_vocabulary(tmp_path: Path) -> None:
    write_hollow(tmp_path, LLAMA)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 211]}')
    assert f"{tmp_path}/generation_config.json: eos_token_id [2, 211]: must be a token" in faults(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 210]}')
    assert not faults(tmp_path)


def places(file: Path) -> dict[str, int]:
    """Return the ends of cut files: in the length of the header, in the header, and in the data."""
    header = int.from_bytes(file.read_bytes()[:8], "little")
    size = file.stat().st_size
    return {"empty": 0, "length": 5, "no header": 8, "header": 8 + header // 2, "no data": 8 + header, "data": size - 1}


@pytest.mark.parametrize("place", ["empty", "length", "no header", "header", "no data", "data"])
def test_half_a_file_is_named(tmp_path: Path, model: Path, place: str) -> None:
    write_hollow(tmp_path, LLAMA)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: places(file)[place]])
    assert faults(tmp_path).startswith(f"{file} cannot be read as safetensors: ")
    assert "copy the file again" in faults(tmp_path)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_header_is_named_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, model: Path, data: st.DataObject
) -> None:
    """One byte becomes another one, or the file is cut or lengthened: what is not a fault reads as before."""
    content = bytearray((model / "model.safetensors").read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    place = data.draw(st.integers(0, end - 1))
    match data.draw(st.sampled_from(["change", "cut", "insert", "append"])):
        case "change":
            content[place] = data.draw(st.integers(0, 255))
        case "cut":
            del content[place:]
        case "insert":
            content.insert(place, data.draw(st.integers(0, 255)))
        case "append":
            content += b"x" * data.draw(st.integers(1, 9))
    directory = tmp_path_factory.getbasetemp() / "bytes"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_bytes((model / "config.json").read_bytes())
    (directory / "model.safetensors").write_bytes(content)
    _, architecture = read_model(directory, {})
    found = list(weight_faults(directory, architecture, needs_head=True))
    if found:
        assert all(str(directory) in fault for fault in found)
    else:
        read = {name: (tensor.dtype, tensor.shape) for name, tensor in stored_tensors(directory).items()}
        assert read == {name: ("BF16", shape) for name, shape in hf_shapes(architecture).items()}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"w": "gone.safetensors"}}, "lists gone.safetensors, which does not exist"),
        ({"weight_map": {"w": "../a.safetensors"}}, "is no file below"),
        ({"weight_map": {"w": "/etc/passwd"}}, "is no file below"),
        ({"weight_map": {"w": "a.safetensors"}}, "lists w in a.safetensors, which lacks it"),
        ({"weight_map": {"w": "passwd.safetensors"}}, "passwd.safetensors cannot be read as safetensors"),
        ({"weight_map": {"w": "directory.safetensors"}}, "lists directory.safetensors, which does not exist"),
        ({}, "is no index of weights"),
        ([], "is no index of weights"),
    ],
)
def test_an_index_that_leads_nowhere_is_named(tmp_path: Path, index: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "directory.safetensors").mkdir()
    (tmp_path / "passwd.safetensors").symlink_to("/etc/passwd")
    write_zeros(tmp_path / "a.safetensors", {"v": (2,)})
    assert str(tmp_path) in faults(tmp_path)
    assert message in faults(tmp_path)
