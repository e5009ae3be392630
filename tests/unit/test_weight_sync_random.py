"""Random weights of a model that has none."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.models.architecture import read_architecture
from megarl.weight_sync.random_weights import LOGIT_STD, write_random_weights
from tests.support.tiny import SIZES, VARIANTS


@pytest.mark.parametrize(("variant", "mean"), [("qwen3", 1.0), ("gemma3_text", 0.0), ("qwen3_next", 0.0)])
def test_random_norms_multiply_by_about_one(tmp_path: Path, variant: str, mean: float) -> None:
    write_random_weights(read_architecture(SIZES | VARIANTS[variant]), tmp_path, dtype=torch.float32)
    weights = load_file(tmp_path / "model.safetensors")
    found = {name: float(weight.mean()) for name, weight in weights.items() if name.endswith("norm.weight")}
    gated = {name: found.pop(name) for name in list(found) if "linear_attn" in name}
    assert found == pytest.approx(dict.fromkeys(found, mean), abs=0.06)
    assert gated == pytest.approx(dict.fromkeys(gated, 1.0), abs=0.06)


@pytest.mark.parametrize(
    ("variant", "router"),
    [("mixtral", "block_sparse_moe.gate"), ("qwen2_moe", "mlp.gate"), ("gpt_oss", "mlp.router")],
)
def test_random_routers_prefer_some_experts(tmp_path: Path, variant: str, router: str) -> None:
    write_random_weights(read_architecture(SIZES | VARIANTS[variant]), tmp_path, dtype=torch.float32)
    weights = load_file(tmp_path / "model.safetensors")
    routers = [weight for name, weight in weights.items() if name.endswith(f".{router}.weight")]
    assert routers
    for weight in routers:
        assert float(weight.std()) * weight.shape[1] ** 0.5 == pytest.approx(LOGIT_STD, rel=0.2)
