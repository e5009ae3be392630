"""Learners whose routers take given experts, or tell which experts they chose."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.batch import Experience
from tests.support.learners import ACTOR, TEMPERATURE, gathered, make_test_learner, outputs_of_all, update
from tests.support.records import experience

NUM_EXPERTS, TOP_K = 8, 2


def random_routes(num_places: int, num_routers: int) -> Tensor:
    """Return experts that no router would choose: [places, routers, k] uint8."""
    generator = torch.Generator().manual_seed(3)
    return torch.rand(num_places, num_routers, NUM_EXPERTS, generator=generator).topk(TOP_K).indices.to(torch.uint8)


def routed(num_routers: int, *, with_scores: bool = False) -> Experience:
    """Return the experience of the other tests, with random routes."""
    batch = experience()
    routes = random_routes(int(batch.num_places().sum()), num_routers)
    if with_scores:
        routes = torch.cat([routes, torch.rand(routes.shape, generator=torch.Generator().manual_seed(4))], dim=-1)
    return replace(batch, routes=routes)


def replay(
    checkpoint: Path,
    section: dict[str, Any],
    batch: Experience,
    max_tokens: int,
    recompute: Any = False,
    replays: Any = "scores",
) -> dict[str, Any]:
    """On each rank: infer, update and infer again."""
    from megarl.learner.batching import Budget

    learner = make_test_learner(checkpoint, section, temperature=TEMPERATURE, recompute=recompute, replays=replays)
    budget = Budget(max_tokens=max_tokens, max_sequences=None)
    before = outputs_of_all(learner, batch, budget, with_entropy=True)
    metrics = update(learner, [batch], ACTOR, budget)
    after = outputs_of_all(learner, batch, budget, with_entropy=True)
    return {"before": before, "metrics": metrics, "after": after}


def recorded(checkpoint: Path, section: dict[str, Any], max_tokens: int) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """Return this rank's samples, the routes of its pass over them, its layers, and log-probabilities of all."""
    from megarl.learner.batching import Budget

    learner = make_test_learner(checkpoint, section, replays="experts")
    spread = learner.spread(experience())
    outputs, routes = learner.infer_with_routes(spread, Budget(max_tokens=max_tokens, max_sequences=None))
    return spread.mine, routes, learner.routed_layers, gathered(spread, outputs).log_probs
