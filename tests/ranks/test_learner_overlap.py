"""Collectives that run while the model computes: nothing shows that they do.

gloo runs them in threads of its own. A stand-in runs them as late as it may, so that what is too early fails.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch

from tests.support.learners import ACTOR, learn_twice, make_test_learner, outputs_of_all, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.stand_ins import late_collectives, overlap

CHECKPOINTS = {
    "dense": ("qwen3-tied", {"num_hidden_layers": 4}),
    "experts": ("qwen3_moe", {"num_hidden_layers": 4}),
}
TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}
SPLITS: dict[str, tuple[int, str, dict[str, Any]]] = {  # world size, checkpoint, section
    "data": (2, "dense", {}),
    "replicated": (2, "dense", {"use_distributed_optimizer": False}),
    "tensor-data": (4, "dense", TENSOR),
    "virtual-data": (4, "dense", PIPELINE | {"virtual_pipeline_model_parallel_size": 2}),
    "experts-data": (2, "experts", {"expert_model_parallel_size": 2}),
    "experts-pipeline-data": (4, "experts", PIPELINE),
}
Mode = Literal["none", "gloo", "late"]


def overlapping(mode: Mode) -> AbstractContextManager[Any]:
    """Return the block in which learners overlap collectives and computation: not, as gloo does it, or late."""
    if mode == "none":
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(overlap(bucket_size=3000))
    if mode == "late":
        stack.enter_context(late_collectives())
    return stack


def live(checkpoint: Path, split: dict[str, Any], max_tokens: int, mode: Mode) -> Any:
    """Return what a learner reports and holds after each kind of thing that happens to it, and its bucket groups."""
    from megarl.learner.batching import Budget
    from megarl.learner.terms import LossTerm

    batch, budget = experience(), Budget(max_tokens=max_tokens, max_sequences=None)
    some, broken = batch.select(torch.arange(6)), replace(batch, advantages=batch.advantages * torch.nan)
    with overlapping(mode):
        learner = make_test_learner(checkpoint, split)
        seen: list[Any] = [outputs_of_all(learner, batch, budget).log_probs]
        for minibatches in ([batch], [some, batch, some], [batch, broken], [broken], [batch]):
            seen.append(update(learner, minibatches, ACTOR, budget))
            with learner.weights() as weights:
                seen.append({name: tensor.clone() for name, tensor in weights.items()})
            seen.append(outputs_of_all(learner, batch, budget).log_probs)
        term = LossTerm(batch=learner.spread(batch), objective=ACTOR)
        learner.forward_backward([term], budget, with_outputs=True).discard()
        seen.append(update(learner, [some], ACTOR, budget))
        seen.append(outputs_of_all(learner, some, budget).log_probs)
    return seen, sum(len(model.bucket_groups) for model in learner.models)


@pytest.mark.parametrize(
    ("name", "max_tokens"),
    [*((name, 24) for name in SPLITS), ("data", 1000), ("virtual-data", 1000)],  # 1000: one micro-batch
)
def test_no_overlap_shows(pool: RankPool, checkpoints: dict[str, Path], name: str, max_tokens: int) -> None:
    world_size, variant, split = SPLITS[name]
    expected, *overlapped = (
        pool.run(world_size, live, checkpoints[variant], split, max_tokens, mode) for mode in ("none", "gloo", "late")
    )
    for ranks in overlapped:
        assert max(num_groups for _, num_groups in ranks) > max(num_groups for _, num_groups in expected)
        for (found, _), (wanted, _) in zip(ranks, expected, strict=True):
            for ours, theirs in zip(found, wanted, strict=True):
                if isinstance(ours, dict) and not isinstance(next(iter(ours.values())), torch.Tensor):
                    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
                else:
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def learn_overlapping(mode: Mode, *args: Any) -> Any:
    """Learn as `learn_twice`. Megatron-Core warns of states that it has no room for, and continues."""
    from megatron.core.optimizer import distrib_optimizer

    with overlapping(mode), patch.object(distrib_optimizer.logger, "warning", side_effect=AssertionError):
        return learn_twice(*args)


@pytest.mark.parametrize("modes", [("gloo", "gloo"), ("gloo", "none"), ("none", "gloo")])
def test_a_checkpoint_does_not_depend_on_it(
    pool: RankPool, checkpoints: dict[str, Path], tmp_path: Path, modes: tuple[Mode, Mode]
) -> None:
    place = (checkpoints["dense"], "policy", {})
    [(metrics, outputs), _] = pool.run(2, learn_overlapping, modes[0], *place, tmp_path, None, True)
    [(metrics_again, outputs_again), _] = pool.run(2, learn_overlapping, modes[1], *place, None, tmp_path, True)
    assert metrics_again == pytest.approx(metrics, rel=1e-5)
    torch.testing.assert_close(outputs_again, outputs, rtol=1e-5, atol=1e-5)
