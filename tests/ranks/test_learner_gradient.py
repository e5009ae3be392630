"""A gradient before the optimizer step: its outputs are those of `infer`, and it may be discarded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megarl.batch import Experience
from megarl.config.policy import ActorSection
from megarl.training.objectives import ActorObjective
from tests.support.learners import TOLERANCE, gathered, make_test_learner, outputs_of_all, update
from tests.support.ranks import RankPool
from tests.support.records import experience

PLAIN = ActorObjective(ActorSection(entropy_coeff=0.0), horizon=8)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {"llama": ("llama", {})}
OBJECTIVE = ActorObjective(ActorSection(entropy_coeff=0.01), horizon=8)
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "data": (2, {}),
    "tensor": (2, {"tensor_model_parallel_size": 2}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2}),
}


def learned_in_one_pass(checkpoint: Path, split: dict[str, Any]) -> dict[str, Any]:
    """On each rank: update from known log-probabilities, and from those of the update's own forward pass.

    Then discard a gradient, alone and before an update on fewer samples.
    """
    from megarl.learner.batching import Budget
    from megarl.learner.terms import LossTerm

    batch, budget = experience(), Budget(max_tokens=24, max_sequences=None)
    fewer = batch.select(torch.arange(len(batch) - 2))
    in_one_pass = replace(batch, old_log_probs=None)

    def learner_and_gradient() -> tuple[Any, Any]:
        learner = make_test_learner(checkpoint, split)
        term = LossTerm(batch=learner.spread(in_one_pass), objective=OBJECTIVE)
        return learner, learner.forward_backward([term], budget, with_outputs=True)

    def result(learner: Any, start: Experience | None, **options: Any) -> tuple[Any, dict[str, Tensor]]:
        metrics = update(learner, [start], OBJECTIVE, budget, **options) if start else {}
        with learner.weights() as weights:
            return metrics, {name: tensor.clone() for name, tensor in weights.items()}

    told = outputs_of_all(make_test_learner(checkpoint, split), batch, budget, with_entropy=True)
    known = replace(batch, old_log_probs=told.log_probs)
    found = {
        "untouched": result(make_test_learner(checkpoint, split), None),
        "read before": result(make_test_learner(checkpoint, split), known),
        "fewer": result(make_test_learner(checkpoint, split), fewer),
    }
    learner, gradient = learner_and_gradient()
    found["read meanwhile"] = result(learner, in_one_pass, gradient=gradient)
    for name, start in (("discarded", None), ("discarded, then fewer", fewer)):
        learner, refused = learner_and_gradient()
        refused.discard()
        found[name] = result(learner, start)
    return found | {"told": told, "seen": gathered(learner.spread(in_one_pass), gradient.outputs)}


def chunks_with_entropy(checkpoint: Path) -> dict[str, set[bool]]:
    """Return whether the head computes entropies, over the chunks of each pass."""
    from megarl.learner import heads, softmax
    from megarl.learner.batching import Budget
    from megarl.learner.terms import LossTerm
    from megarl.training.objectives import SFTObjective

    learner, batch, budget = make_test_learner(checkpoint, {}), experience(), Budget(max_tokens=24, max_sequences=None)
    spread = learner.spread(batch)
    plain, extra = (
        LossTerm(batch=spread, objective=objective) for objective in (PLAIN, SFTObjective("actor/ptx_loss", 0.5))
    )
    passes: dict[str, Callable[[], Any]] = {
        "infer": lambda: learner.infer(spread, budget),
        "infer, asked": lambda: learner.infer(spread, budget, with_entropy=True),
        "update": lambda: update(learner, [batch], PLAIN, budget),
        "update, bonus": lambda: update(learner, [batch], OBJECTIVE, budget),
        "update, bonus and pairs": lambda: update(learner, [batch], OBJECTIVE, budget, extra_terms=[extra]),
        "update, asked": lambda: learner.forward_backward([plain], budget, with_outputs=True),
        "supervised": lambda: update(learner, [batch], SFTObjective(), budget),
    }
    found = {}
    for name, run in passes.items():
        with patch.object(heads, "moments", wraps=softmax.moments) as computed:
            run()
        found[name] = {call.kwargs["with_entropy"] for call in computed.call_args_list}
    return found


def test_entropies_are_computed_only_on_request(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    assert pool.run(1, chunks_with_entropy, checkpoints["llama"]) == [
        {
            "infer": {False},
            "infer, asked": {True},
            "update": {False},
            "update, bonus": {True},
            "update, bonus and pairs": {True, False},
            "update, asked": {True},
            "supervised": {False},
        }
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_one_pass_equals_two_and_drops_discarded_gradient(
    pool: RankPool, checkpoints: dict[str, Path], split: str
) -> None:
    for found in pool.run(SPLITS[split][0], learned_in_one_pass, checkpoints["llama"], SPLITS[split][1]):
        torch.testing.assert_close(found["seen"].log_probs, found["told"].log_probs, **TOLERANCE)
        torch.testing.assert_close(found["seen"].entropy, found["told"].entropy, **TOLERANCE)
        pairs = (
            ("read meanwhile", "read before"),
            ("discarded, then fewer", "fewer"),
            ("discarded", "untouched"),
        )
        for one, other in pairs:
            (metrics, weights), (expected, expected_weights) = found[one], found[other]
            assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
            torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0 if one == "discarded" else 1e-6)
        assert found["read before"][0]["grad_norm"] > 0.0
        different = [not tensor.equal(found["untouched"][1][name]) for name, tensor in found["fewer"][1].items()]
        assert any(different)
