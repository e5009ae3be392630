"""The rules of the engine's layout are what vLLM's own loaders do, for ranks of engines larger than this machine."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.models.architecture import read_architecture
from megarl.models.engine import engine_layout
from tests.support.forked import run_forked
from tests.support.offline import offline_layout
from tests.support.tiny import VARIANTS, write_config

pytestmark = pytest.mark.ranks

OF_IMAGES = () if find_spec("torchvision") else ("qwen3_5_text", "qwen3_5_moe_text")
"""Variants whose class in vLLM imports torchvision."""
AT_MOST_TWO = ("gpt_oss", "qwen3_next")
"""Variants that four ranks of an engine cannot share: they have two key-value heads, or two key heads."""


def differences(model_dir: Path, ranks: list[tuple[int, int]], expert_parallel: bool) -> dict[str, Any]:
    """Return, for each rank of an engine, the pieces of vLLM's loaders alone and of the rules alone."""
    architecture = read_architecture(json.loads((model_dir / "config.json").read_text()))
    found = {}
    for tp_rank, tp_size in ranks:
        settings = {"tp_rank": tp_rank, "tp_size": tp_size, "expert_parallel": expert_parallel}
        traced = {str(piece) for piece in offline_layout(model_dir, **settings, dtype="bfloat16")}
        rules = engine_layout(architecture, **settings, dtype=torch.bfloat16, latent_fused=False)
        ruled = {str(piece) for piece in rules}
        found[f"rank {tp_rank} of {tp_size}"] = (sorted(traced - ruled), sorted(ruled - traced))
    return found


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in OF_IMAGES])
def test_rules_equal_traces_of_vllm(tmp_path: Path, variant: str) -> None:
    """Key-value heads are fewer than the ranks of the largest engine, so that neighbours have the same."""
    model_dir = write_config(tmp_path, variant)
    ranks = [(0, 1), (1, 2)] + ([] if variant in AT_MOST_TWO else [(0, 4), (3, 4)])
    for expert_parallel in (False, True) if "num_experts" in (model_dir / "config.json").read_text() else (False,):
        found = run_forked(differences, model_dir, ranks, expert_parallel, log=tmp_path / "log", timeout_s=300)
        assert found == dict.fromkeys(found, ([], []))
