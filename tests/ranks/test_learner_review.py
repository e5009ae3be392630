"""An update that is reviewed: the review sees what `infer` tells, and decides from which samples the model learns."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megarl.batch import Experience, Rollouts
from megarl.config.policy import ActorSection
from megarl.training.objectives import ActorObjective
from tests.support.learners import TOLERANCE, make_test_learner
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


class RefusedError(Exception):
    """Raised by a review."""


def reviewed(checkpoint: Path, split: dict[str, Any]) -> dict[str, Any]:
    """On each rank: update after no review, and after reviews that agree, choose other samples, or raise."""
    from megarl.learner.batching import Budget

    batch, budget = experience(), Budget(max_tokens=24, max_sequences=None)
    fewer = batch.select(torch.arange(len(batch) - 2))
    seen = []

    def learnt(start: Experience, review: Any = None) -> tuple[Any, dict[str, Tensor]]:
        learner = make_test_learner(checkpoint, split)
        metrics = {}
        with suppress(RefusedError):
            metrics = learner.update([start], OBJECTIVE, budget, review=review)
        with learner.weights() as weights:
            return metrics, {name: tensor.clone() for name, tensor in weights.items()}

    def agrees(outputs: Any) -> Rollouts | None:
        seen.append(outputs)
        return None

    def refuses(outputs: Any) -> Rollouts | None:
        raise RefusedError

    learner = make_test_learner(checkpoint, split)
    told = learner.infer(batch, budget, with_entropy=True)
    known = replace(batch, old_log_probs=told.log_probs)
    with learner.weights() as weights:
        untouched = {name: tensor.clone() for name, tensor in weights.items()}
    found = {
        "read before": learnt(known),
        "read meanwhile": learnt(replace(batch, old_log_probs=None), agrees),
        "fewer": learnt(fewer),
        "fewer, chosen": learnt(batch, lambda outputs: fewer),
        "untouched": ({}, untouched),
        "refused": learnt(batch, refuses),
    }
    [outputs] = seen
    return found | {"told": told, "seen": outputs}


def chunks_with_entropy(checkpoint: Path) -> dict[str, set[bool]]:
    """Return whether the head computes entropies, over the chunks of each pass."""
    from megarl.learner import heads, softmax
    from megarl.learner.batching import Budget
    from megarl.learner.terms import LossTerm
    from megarl.training.objectives import PTXObjective, SFTObjective

    learner, batch, budget = make_test_learner(checkpoint, {}), experience(), Budget(max_tokens=24, max_sequences=None)
    extra = LossTerm(batch=batch, objective=PTXObjective(0.5))
    passes: dict[str, Callable[[], Any]] = {
        "infer": lambda: learner.infer(batch, budget),
        "infer, asked": lambda: learner.infer(batch, budget, with_entropy=True),
        "update": lambda: learner.update([batch], PLAIN, budget),
        "update, bonus": lambda: learner.update([batch], OBJECTIVE, budget),
        "update, bonus and pairs": lambda: learner.update([batch], OBJECTIVE, budget, extra_terms=[extra]),
        "update, reviewed": lambda: learner.update([batch], PLAIN, budget, review=lambda outputs: None),
        "supervised": lambda: learner.update([batch], SFTObjective(), budget),
    }
    found = {}
    for name, run in passes.items():
        with patch.object(heads, "moments", wraps=softmax.moments) as computed:
            run()
        found[name] = {call.kwargs["with_entropy"] for call in computed.call_args_list}
    return found


def test_entropies_are_computed_only_where_somebody_asks_for_them(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    assert pool.run(1, chunks_with_entropy, checkpoints["llama"]) == [
        {
            "infer": {False},
            "infer, asked": {True},
            "update": {False},
            "update, bonus": {True},
            "update, bonus and pairs": {True, False},
            "update, reviewed": {True},
            "supervised": {False},
        }
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_it_sees_what_infer_tells_and_decides_what_is_learned(
    pool: RankPool, checkpoints: dict[str, Path], split: str
) -> None:
    for found in pool.run(SPLITS[split][0], reviewed, checkpoints["llama"], SPLITS[split][1]):
        torch.testing.assert_close(found["seen"].log_probs, found["told"].log_probs, **TOLERANCE)
        torch.testing.assert_close(found["seen"].entropy, found["told"].entropy, **TOLERANCE)
        pairs = (("read meanwhile", "read before"), ("fewer, chosen", "fewer"), ("refused", "untouched"))
        for one, other in pairs:
            (metrics, weights), (expected, expected_weights) = found[one], found[other]
            assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
            torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0 if one == "refused" else 1e-6)
        assert found["read before"][0]["grad_norm"] > 0.0
        different = [not tensor.equal(found["untouched"][1][name]) for name, tensor in found["fewer"][1].items()]
        assert any(different)
