"""No split changes a policy loss: each `loss_mode` and each `loss_agg_mode` equals autograd and one rank alone.

The real learner updates on two mini-batches under every split. Metrics, gradient norm and every updated weight must
equal the results of one rank with one micro-batch, which must agree with `transformers` on the first mini-batch.
"""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.algorithms.config import LOSSES, LossAggregation, PolicyLossSection
from megarl.batch import Experience
from megarl.config.policy import ActorSection
from megarl.models.architecture import hf_shapes, read_architecture
from megarl.training.objectives import ActorObjective
from tests.support.estimates import mark_alone
from tests.support.layouts import slices
from tests.support.learners import TEMPERATURE, make_test_learner, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.references import reference_outputs

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {"llama": ("llama", {})}
MODES = [name for name in LOSSES if name != "custom"]
BOUNDS = {"dppo_tv": (0.001, 0.002), "dppo_kl": (0.02, 0.05)}  # of divergences
CASES = {
    f"{loss_mode}, {agg_mode}": ActorSection(
        policy_loss=PolicyLossSection(
            loss_mode=loss_mode,
            clip_cov_ratio=0.5,
            clip_cov_lb=0.0,
            clip_cov_ub=100.0,
            kl_cov_ratio=0.2,
        ),
        loss_agg_mode=agg_mode,
        clip_ratio_low=BOUNDS.get(loss_mode, (0.5, 1.0))[0],
        clip_ratio_high=BOUNDS.get(loss_mode, (0.5, 1.0))[1],
        entropy_coeff=0.01,
    )
    for loss_mode, agg_mode in product(MODES, get_args(LossAggregation))
    if loss_mode == "vanilla" or agg_mode == "token-mean"  # aggregation does not know what it sums
}
SPLITS = {  # world size, section, balanced by length, tokens of a micro-batch
    "micro-batches": (1, {}, True, 24),
    "data": (2, {}, False, 24),
    "tensor and pipeline": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, True, 24),
}
HORIZON = 8


@pytest.fixture(scope="module")
def checkpoint(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


@pytest.fixture(scope="module")
def alone(pool: RankPool, checkpoint: Path) -> dict[str, Any]:
    return pool.run(1, updated, checkpoint, {}, True, 1000)[0]


def batches(actor: ActorSection) -> list[Experience]:
    """Return two mini-batches of two prompts, as the loss needs them, without two of the responses.

    Every token is corrected by another factor, as if older weights had drawn it.
    """
    batch = experience()
    batch = replace(batch, weights=torch.linspace(0.5, 2.0, len(batch.mask)))
    batch = batch.without_responses(torch.arange(len(batch)) % 5 == 1)
    return [mark_alone(batch.select(samples), actor) for samples in torch.arange(len(batch)).split(4)]


def updated(checkpoint: Path, split: dict[str, Any], balance: bool, max_tokens: int) -> dict[str, Any]:
    """Return for each loss the metrics of two mini-batches, and this rank's parts of the weights after them."""
    from megarl.learner.batching import Budget

    found = {}
    for name, actor in CASES.items():
        learner = make_test_learner(checkpoint, split, temperature=TEMPERATURE, balance=balance)
        budget, objective = Budget(max_tokens=max_tokens, max_sequences=None), ActorObjective(actor, horizon=HORIZON)
        metrics = [update(learner, [minibatch], objective, budget) for minibatch in batches(actor)]
        with learner.weights() as weights:
            parts = [(piece.name, piece.box, piece.view(weights[piece.param]).clone()) for piece in learner.layout()]
        found[name] = metrics, parts
    return found


@pytest.fixture(scope="module")
def expected(checkpoint: Path, alone: dict[str, Any]) -> dict[str, tuple[Any, dict[str, Tensor]]]:
    """Metrics and complete weights of one rank."""
    shapes = hf_shapes(read_architecture(json.loads((checkpoint / "config.json").read_text())))
    found = {}
    for name, (metrics, parts) in alone.items():
        whole = {param: torch.full(shape, torch.nan) for param, shape in shapes.items()}
        for param, box, values in parts:
            whole[param][slices(box)] = values
        assert not any(tensor.isnan().any() for tensor in whole.values())
        found[name] = metrics, whole
    return found


@pytest.mark.parametrize("name", CASES)
def test_one_rank_does_what_autograd_does(alone: dict[str, Any], checkpoint: Path, name: str) -> None:
    actor = CASES[name]
    _, norm, metrics = reference_outputs(checkpoint, ActorObjective(actor, horizon=HORIZON), batches(actor)[0])
    found = alone[name][0][0]
    assert found["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert {key: found[key] for key in metrics} == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    assert norm > 0.0


def test_no_two_losses_are_the_same(alone: dict[str, Any]) -> None:
    norms = {name: metrics[0]["grad_norm"] for name, (metrics, _) in alone.items()}
    assert len({f"{norm:.4e}" for norm in norms.values()}) == len(norms), norms


@pytest.mark.parametrize("split", SPLITS)
def test_no_split_shows(
    pool: RankPool, checkpoint: Path, expected: dict[str, tuple[Any, dict[str, Tensor]]], split: str
) -> None:
    world_size, *arguments = SPLITS[split]
    start = load_file(checkpoint / "model.safetensors")
    for rank, found in enumerate(pool.run(world_size, updated, checkpoint, *arguments)):
        for name, (metrics, parts) in found.items():
            where = f"{name}, rank {rank}"
            expected_metrics, expected_weights = expected[name]
            # Adam's first step has the size of the learning rate even if the gradient is nearly zero; then rounding
            # decides its sign. So the tolerance is larger after it, and applies to tensors, not to their elements.
            for ours, theirs, tolerance in zip(metrics, expected_metrics, (1e-5, 1e-3), strict=True):
                assert ours == pytest.approx(theirs, rel=tolerance, abs=0.1 * tolerance), where
            for param, box, values in parts:
                theirs, before = expected_weights[param][slices(box)], start[param][slices(box)]
                assert (values - theirs).norm() <= 1e-2 * (theirs - before).norm(), f"{where}: {param}"
