"""Faults of vLLM's own reload: each is handled, and each shows where the handling is taken away."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from megarl.batch import Generation
from megarl.rollout import patches
from megarl.rollout.config import SamplingSection
from tests.support.engines import PROMPTS, check_against_rules, generating, log_probs, start, tear_down, tensors_of
from tests.support.ranks import RankPool
from tests.support.tiny import write_checkpoint

patches.prepare_environment()

pytestmark = pytest.mark.ranks

Fault = Callable[[pytest.MonkeyPatch, Any], None]
RESPONSE = 8
# vLLM's own latent attention computes on CPU at one size only; see CPU_ENVIRONMENT in rollout/patches/process.py.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}


def write_two(root: Path, variant: str, **overrides: Any) -> list[Path]:
    first, second = (write_checkpoint(root / str(seed), variant, seed=seed, **overrides) for seed in (1, 3))
    (root / "bare").mkdir()
    shutil.copy(first / "config.json", root / "bare")
    return [first, second, root / "bare"]


def stale_tied_head(patch: pytest.MonkeyPatch, engine: Any) -> None:
    patch.setattr(engine.weights, "_layout", replace(engine.weights._layout, tied=frozenset()))


def experts_packed_once(patch: pytest.MonkeyPatch, engine: Any) -> None:
    patch.setattr("megarl.rollout.reload.is_on_cpu", lambda module: False)


def kept_prefix_cache(patch: pytest.MonkeyPatch, engine: Any) -> None:
    patch.setattr(engine._llm, "reset_prefix_cache", lambda: True)


def stale_latent_projections(patch: pytest.MonkeyPatch, engine: Any) -> None:
    patch.setattr("megarl.rollout.reload.finish", lambda model, dtype: None)


def responses_with_faults(paths: list[Path], faults: list[Fault], settings: dict[str, Any]) -> list[list[Generation]]:
    """Return the engine's responses with the second checkpoint: handled, then with each fault, then handled again."""
    first, second, bare = paths
    os.environ["VLLM_MLA_DISABLE"] = str(int("engine_kwargs" not in settings))
    engine = start(bare, tp_size=1, free_cache_engine=False, **settings)
    check_against_rules(engine.weights.layout(), bare, tp_size=1, latent_fused="engine_kwargs" in settings)
    detach_latent_projections(engine)

    def answer(checkpoint: Path) -> list[Generation]:
        with generating(engine, tensors_of(checkpoint)):
            return engine.generate(PROMPTS, SamplingSection(), max_tokens=RESPONSE, step=0)

    answers = []
    for fault in [lambda *_: None, *faults, lambda *_: None]:
        answer(first)
        with pytest.MonkeyPatch.context() as patch:
            fault(patch, engine)
            answers.append(answer(second))
    tear_down(engine)
    return answers


def detach_latent_projections(engine: Any) -> None:
    """Give derived projections memory of their own, as they have under quantisation; here they are views."""
    from vllm.model_executor.layers.attention import MLAAttention

    for module in engine.weights._modules.values():
        if isinstance(module, MLAAttention):
            for name in ("W_UV", "W_UK_T"):
                derived = getattr(module, name)
                derived.data = derived.data.clone()


def error(checkpoint: Path, generations: list[Generation]) -> float:
    """The largest difference of log-probabilities to `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    differences = [
        torch.tensor(generation.log_probs) - log_probs(model, PROMPTS[generation.prompt], generation.token_ids, 1.0)
        for generation in generations
    ]
    return float(torch.cat(differences).abs().max())


@pytest.mark.parametrize(
    ("variant", "overrides", "faults", "settings"),
    [
        (
            "qwen3_moe",
            {"tie_word_embeddings": True},
            [stale_tied_head, experts_packed_once, kept_prefix_cache],
            {},
        ),
        (
            "deepseek_v3",
            LATENT,
            [stale_latent_projections, experts_packed_once],
            {"enable_prefix_caching": False, "engine_kwargs": {"attention_backend": "CPU_MLA"}},
        ),
    ],
)
def test_a_fault_shows_where_it_is_not_handled(
    pool: RankPool,
    tmp_path: Path,
    variant: str,
    overrides: dict[str, Any],
    faults: list[Fault],
    settings: dict[str, Any],
) -> None:
    paths = write_two(tmp_path, variant, **overrides)
    [(before, *faulty, after)] = pool.run(1, responses_with_faults, paths, faults, settings)
    assert error(paths[1], before) < 1e-4
    assert error(paths[1], after) < 1e-4
    for fault, generations in zip(faults, faulty, strict=True):
        assert error(paths[1], generations) > 0.01, fault.__name__


def test_gates_that_vllm_joins_once_follow_every_sync() -> None:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    from megarl.rollout import reload

    runner: Any = nn.Module()
    runner.gate, runner.shared_expert_gate = nn.Linear(4, 8, bias=False), nn.Linear(4, 1, bias=False)
    runner._combined_gate_weight = None
    with torch.no_grad():
        MoERunner._maybe_fuse_gate_weights(runner)  # type: ignore[arg-type] # as at the first forward
        joined = runner._combined_gate_weight
        runner.gate.weight.fill_(1.0)
        runner.shared_expert_gate.weight.fill_(2.0)
        MoERunner._maybe_fuse_gate_weights(runner)  # type: ignore[arg-type]
        assert not (joined == 1.0).any()  # vLLM keeps the old ones
        reload.finish(runner, torch.float32)
    assert runner._combined_gate_weight is joined  # a captured graph reads this tensor
    assert joined.tolist() == [[1.0] * 4] * 8 + [[2.0] * 4]
