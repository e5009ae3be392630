"""On a GPU: an offloaded reference gives the same exact divergence and gradient, and logits are not rounded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.policy import ActorSection
from megarl.training.objectives import ActorObjective
from tests.support.heads import assert_not_rounded, in_bfloat16
from tests.support.learners import make_test_learner
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.tiny import write_checkpoint

pytestmark = pytest.mark.gpu

ACTOR = ActorObjective(ActorSection(use_kl_loss=True, kl_loss_type="full", kl_loss_coef=3.0), horizon=8)


def diverge(policy: Path, reference: Path, param_offload: bool) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the divergence before an update, and the metrics of the update. Runs on one rank."""
    from megarl.learner.batching import Budget

    split, device = {"param_offload": param_offload}, "cuda"
    learner = make_test_learner(policy, split, device=device)
    other = make_test_learner(reference, split, device=device, optim=None, mesh=learner.mesh)
    budget = Budget(max_tokens=24, max_sequences=None)
    kl = learner.infer(experience(), budget, against=other).kl
    metrics: dict[str, Any] = learner.update([experience()], ACTOR, budget, against=other)
    homes = {parameter.device.type for parameter in other.modules[0].parameters()}
    assert homes == {"cpu" if param_offload else "cuda"}
    return kl, metrics


def test_nothing_is_rounded_to_the_type_of_the_weights_before_the_gradient() -> None:
    with RankPool() as pool:
        [numbers] = pool.run(1, in_bfloat16, "cuda")
    assert_not_rounded(*numbers)


def test_an_offloaded_reference_is_read_all_the_same(tmp_path: Path) -> None:
    policy, reference = (write_checkpoint(tmp_path / f"{seed}", "qwen3-tied", seed=seed) for seed in (0, 1))
    with RankPool() as pool:
        [(kl, metrics)] = pool.run(1, diverge, policy, reference, False)
        [(kl_again, metrics_again)] = pool.run(1, diverge, policy, reference, True)
    assert kl.max() > 0.01
    torch.testing.assert_close(kl_again, kl)
    assert metrics_again == pytest.approx(metrics, rel=1e-4)
