"""An update that also learns from supervised pairs: one step on the sum of two losses, each a mean over its tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.algorithms.losses import Totals
from megarl.batch import Prompts, Rollouts
from megarl.training.objectives import SFTObjective
from tests.support.learners import ACTOR, TEMPERATURE, make_test_learner, outputs_of_all, update
from tests.support.ranks import RankPool
from tests.support.records import answer, experience, prompts
from tests.support.references import gradient_norm, outputs_of

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3-tied", {"num_hidden_layers": 4}),
    "experts": ("qwen3_moe", {}),
}
PTX = SFTObjective("actor/ptx_loss", 2.0)
PIPELINE = {"pipeline_model_parallel_size": 2}
SPLITS: dict[str, tuple[int, dict[str, Any], int]] = {  # world size, section, tokens of a micro-batch
    "one rank, one micro-batch of each": (1, {}, 1000),
    "one rank, many micro-batches": (1, {}, 24),
    "tensor": (2, {"tensor_model_parallel_size": 2}, 24),
    "pipeline": (2, PIPELINE, 24),
    "context": (2, {"context_parallel_size": 2}, 1000),
    "data, with fewer pairs than ranks": (4, {}, 1000),
    "virtual pipeline, data": (4, PIPELINE | {"virtual_pipeline_model_parallel_size": 2}, 24),
}


def pairs() -> Rollouts:
    """Return three pairs, of other lengths than the samples of the experience."""
    known = [replace(prompt, token_ids=[id % 199 for id in prompt.token_ids]) for prompt in prompts([5, 2, 7]).prompts]
    return answer(Prompts(prompts=known), [3, 11, 6])


def mixed_update(checkpoint: Path, split: dict[str, Any], max_tokens: int) -> tuple[dict[str, float], Tensor]:
    """Return the metrics of a mixed update, and the policy's log-probabilities after it. Runs on every rank."""
    from megarl.learner.batching import Budget
    from megarl.learner.terms import LossTerm

    learner = make_test_learner(checkpoint, split, temperature=TEMPERATURE)
    budget = Budget(max_tokens=max_tokens, max_sequences=None)
    extra = LossTerm(batch=learner.spread(pairs()), objective=PTX, temperature=1.0)
    metrics = update(learner, [experience()], ACTOR, budget, extra_terms=[extra])
    return metrics, outputs_of_all(learner, experience(), budget).log_probs


def expected_metrics(checkpoint: Path) -> dict[str, float]:
    """Return the metrics by `transformers`, and autograd through the sum of both losses."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    batch = experience()
    loss, metrics = ACTOR(outputs_of(model, batch, {None: model}), batch, Totals.of(batch.num_learnt()))
    outputs = outputs_of(model, pairs(), {None: model}, temperature=1.0)
    ptx_loss = -outputs.log_probs.mean()
    (loss + 2.0 * ptx_loss).backward()
    metrics |= {"actor/ptx_loss": ptx_loss.detach(), "grad_norm": torch.tensor(gradient_norm(model))}
    return {name: float(value) for name, value in metrics.items()}


def test_mixed_update_follows_summed_losses_under_every_split(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    learner = {"lr": 1e-3, "skipped_updates": 0.0, "empty_minibatches": 0.0, "idle_minibatches": 0.0}
    expected = expected_metrics(checkpoints["dense"]) | learner
    first: Tensor | None = None
    for name, (world_size, split, max_tokens) in SPLITS.items():
        for metrics, after in pool.run(world_size, mixed_update, checkpoints["dense"], split, max_tokens):
            assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6), name
            first = after if first is None else first
            torch.testing.assert_close(after, first, rtol=1e-4, atol=1e-4)


def silence(outputs: Any, micro: Rollouts, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective without a gradient."""
    loss = 0.0 * outputs.log_probs.sum()
    return loss, {"loss": loss.detach()}


def router_norms(checkpoint: Path, split: dict[str, Any]) -> tuple[float, float]:
    """Return the gradient norm of the router's loss on a batch, and on the same batch in two parts."""
    from megarl.learner.batching import Budget
    from megarl.learner.terms import LossTerm

    batch, budget = experience(), Budget(max_tokens=24, max_sequences=None)
    start, end = (batch.select(samples) for samples in torch.arange(len(batch)).split([5, 3]))
    section = split | {"override_transformer_config": {"moe_z_loss_coeff": 0.05}}
    whole = update(make_test_learner(checkpoint, section), [batch], silence, budget)
    learner = make_test_learner(checkpoint, section)
    extra = [LossTerm(batch=learner.spread(end), objective=silence)]
    parts = update(learner, [start], silence, budget, extra_terms=extra)
    return whole["grad_norm"], parts["grad_norm"]


def test_routers_see_tokens_of_both_parts_together(pool: RankPool, checkpoints: dict[str, Path]) -> None:
    for world_size, split in ((1, {}), (2, {"expert_model_parallel_size": 2})):
        for whole, parts in pool.run(world_size, router_norms, checkpoints["experts"], split):
            assert parts == pytest.approx(whole, rel=1e-5)
            assert whole > 0
