"""The engine's routes are the experts that it chose for each token, and those of cached keys too."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.batch import Generation
from megarl.rollout.config import SamplingSection
from tests.support.engines import (
    draw,
    generating,
    new_session,
    start,
    tear_down,
    tensors_of,
    write_two_checkpoints,
)
from tests.support.ranks import RankPool
from tests.support.routes import scored_by_transformers

pytestmark = pytest.mark.ranks

SAMPLED = SamplingSection(n=2, do_sample=True)
RESPONSE = 12


def drawn_with_routes(
    paths: list[Path], tp_size: int, routing_replay: str
) -> tuple[list[Generation], list[Generation], list[Generation]]:
    """On each rank: what its replica draws at once, and as far as it comes in 5 steps and then in others."""
    first, _, bare = paths
    engine = start(bare, tp_size=tp_size, dtype="float32", routing_replay=routing_replay)
    options: dict[str, Any] = {"max_tokens": RESPONSE, "step": 0, "with_routes": True}
    with generating(engine, tensors_of(first)):
        whole = draw(engine.open_queue(SAMPLED, **options), new_session(SAMPLED.n))
        part = draw(engine.open_queue(SAMPLED, final_only=False, **options), new_session(SAMPLED.n), 5)
        rest = draw(engine.open_queue(SAMPLED, final_only=False, **options), part)
    tear_down(engine)
    return tuple([each for group in groups for each in group.samples] for groups in (whole, part, rest))  # type: ignore[return-value]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_routes_are_those_of_transformers(pool: RankPool, tmp_path: Path, tp_size: int) -> None:
    paths = write_two_checkpoints(tmp_path, "qwen3_moe")
    for samples in pool.run(2, drawn_with_routes, paths, tp_size, "engine"):
        whole, part, rest = samples
        assert any(each.num_cached for each in whole)
        assert all(not each.complete and each.routes is None for each in part)
        assert all(each.complete for each in rest)
        for each in (*whole, *rest):
            assert each.routes is not None and each.routes.dtype == torch.uint8
            expected = scored_by_transformers(paths[0], each).topk(each.routes.shape[2]).indices
            assert torch.equal(each.routes.sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral"])
def test_scores_are_those_of_transformers(pool: RankPool, tmp_path: Path, variant: str) -> None:
    paths = write_two_checkpoints(tmp_path, variant)
    for samples in pool.run(2, drawn_with_routes, paths, 2, "engine_scores"):
        for each in (*samples[0], *samples[2]):
            assert each.routes is not None and each.routes.dtype == torch.float32
            experts, scores = each.routes.chunk(2, dim=2)
            expected = scored_by_transformers(paths[0], each)
            assert torch.equal(experts.sort(-1).values, expected.topk(experts.shape[2]).indices.sort(-1).values)
            torch.testing.assert_close(scores, expected.gather(-1, experts.long()), rtol=1e-4, atol=1e-5)
