"""The exact divergence from a reference, as a learner reports it and in its loss, equals that of complete logits.

Learners under every split, and `transformers` with plain autograd through all logits, compare two checkpoints with
different weights.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.kl import Divergence
from megarl.config.policy import ActorSection
from megarl.training.objectives import ActorObjective
from tests.support.learners import TOLERANCE, learner_outputs
from tests.support.ranks import RankPool
from tests.support.references import reference_outputs

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "policy": ("qwen3-tied", {"num_hidden_layers": 4}),
    "reference": ("qwen3-tied", {"num_hidden_layers": 4, "seed": 1}),
    "teacher": ("qwen3-tied", {"num_hidden_layers": 8, "seed": 2}),
    "policy of experts": ("qwen3_moe", {}),
    "reference of experts": ("qwen3_moe", {"seed": 1}),
}
TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CONTEXT, VIRTUAL = {"context_parallel_size": 2}, PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
SPLITS: dict[str, tuple[int, dict[str, Any], int]] = {  # world size, section, tokens of a micro-batch
    "one rank, one micro-batch": (1, {}, 1000),
    "one rank, many micro-batches": (1, {}, 24),
    "tensor": (2, TENSOR, 24),
    "tensor, no sequence parallelism": (2, TENSOR | {"sequence_parallel": False}, 1000),
    "pipeline": (2, PIPELINE, 24),
    "data": (2, {}, 24),
    "context": (2, CONTEXT, 24),
    "tensor, context": (4, TENSOR | CONTEXT, 1000),
    "virtual pipeline, data": (4, VIRTUAL, 24),
}
# The divergence dominates the gradient.
ACTOR = ActorObjective(
    ActorSection(use_kl_loss=True, kl_loss_type="full", kl_loss_coef=3.0, loss_agg_mode="seq-mean-token-mean"),
    horizon=8,
)


def check(found: dict[str, Any], expected: Any, norm: float, metrics: dict[str, float]) -> None:
    torch.testing.assert_close(found["before"].log_probs, expected.log_probs.detach(), **TOLERANCE)
    torch.testing.assert_close(found["before"].kl, expected.kl.detach(), **TOLERANCE)
    assert found["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, value in metrics.items():
        assert found["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_divergence_equals_full_logits_under_every_split(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    policy, reference = checkpoints["policy"], checkpoints["reference"]
    expected = reference_outputs(policy, ACTOR, against=reference)
    assert expected[2]["actor/kl_loss"] > 0.1
    first: dict[str, Any] | None = None
    for world_size, split, max_tokens in SPLITS.values():
        arguments = (policy, "policy", split, max_tokens, ACTOR, reference)
        for found in pool.run(world_size, learner_outputs, *arguments):
            check(found, *expected)
            first = first or found
            torch.testing.assert_close(found["after"].kl, first["after"].kl, rtol=1e-4, atol=1e-4)
    assert first is not None
    assert first["after"].kl.sum() < first["before"].kl.sum()


@pytest.mark.parametrize("divergence", [Divergence("full_forward"), Divergence("full_js", 0.3)], ids=str)
@pytest.mark.parametrize("split", ["one rank, many micro-batches", "tensor, context", "virtual pipeline, data"])
def test_each_data_source_has_its_own_teacher(
    pool: RankPool, checkpoints: dict[str, Path], split: str, divergence: Divergence
) -> None:
    policy, reference, named = checkpoints["policy"], checkpoints["reference"], {"odd": checkpoints["teacher"]}
    expected = reference_outputs(policy, ACTOR, against=reference, named=named, divergence=divergence)
    world_size, section, max_tokens = SPLITS[split]
    arguments = (policy, "policy", section, max_tokens, ACTOR, reference, named, divergence)
    for found in pool.run(world_size, learner_outputs, *arguments):
        check(found, *expected)


def test_expert_parallel_ranks_take_part_in_reference_pass(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    policy, reference = checkpoints["policy of experts"], checkpoints["reference of experts"]
    expected = reference_outputs(policy, ACTOR, against=reference)
    arguments = ({"expert_model_parallel_size": 2}, 24, ACTOR, reference)
    for found in pool.run(2, learner_outputs, policy, "policy", *arguments):
        check(found, *expected)


def test_untrained_policy_has_zero_divergence(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    policy = checkpoints["policy"]
    arguments = (policy, "policy", TENSOR, 24, ACTOR, policy)
    for found in pool.run(2, learner_outputs, *arguments):
        assert found["before"].kl.abs().max() < 1e-6
        assert found["metrics"]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
        assert found["after"].kl.max() > 1e-4
