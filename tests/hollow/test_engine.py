"""The engine of vLLM's CUDA build on the hollow device: greedy responses are those of vLLM's CPU build.

The two builds cannot be in one environment. So this module also runs in the CPU's, and there the same test checks the
expected tokens: `.venv/bin/python -m pytest tests/hollow/test_engine.py`.
"""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.batch import Generation
from megarl.platform.device import on_cuda
from megarl.rollout.config import SamplingSection
from tests.support.engines import (
    PROMPTS,
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

GREEDY = SamplingSection(n=1, do_sample=False)
SAMPLED = SamplingSection(n=2, do_sample=True)
MAX_TOKENS = 6
ON_DEVICE = "HOLLOW_MAIL" in os.environ
SETTINGS = [("", True), ("expandable_segments:True", True), ("", False)]  # of torch's allocator; without graphs
TOKENS = {  # of the two checkpoints. The CPU computes in float32, and CUDA in bfloat16; no two tokens are nearly equal
    "qwen3": [
        [[191, 195, 115, 191, 115, 191], [52] * 6, [52, 92, 16, 19, 72, 18]]
        + [[43, 178, 178, 178, 178, 178], [105, 105, 105, 105, 105, 26], [117, 195, 142, 144, 31, 14]],
        [[146, 101, 166, 177, 166, 177], [48, 59, 85, 209, 25, 85], [64, 166, 101, 105, 40, 64]]
        + [[207, 145, 105, 164, 37, 93], [130, 208, 109, 56, 129, 105], [94, 207, 188, 56, 188, 188]],
    ],
    "llama": [
        [[95, 9, 9, 9, 9, 9], [196] * 6, [74, 121, 88, 196, 88, 82]]
        + [[117, 195, 117, 195, 117, 47], [22, 22, 95, 210, 110, 210], [134, 89, 63, 76, 89, 89]],
        [[50, 68, 188, 72, 181, 58], [32] * 6, [5] * 6]
        + [[55, 122, 68, 63, 163, 5], [52, 52, 144, 161, 144, 161], [156, 156, 110, 42, 42, 42]],
    ],
}


def generate(paths: list[Path], enforce_eager: bool) -> list[list[list[int]]]:
    """Return the greedy responses to all prompts after a sync of each of two checkpoints. Runs on every rank."""
    *checkpoints, bare = paths
    settings = {
        "dtype": "bfloat16" if on_cuda() else "float32",
        "gpu_memory_utilization": 0.2,
        "enforce_eager": enforce_eager,
    }
    engine = start(bare, tp_size=1, **settings)
    found = []
    for checkpoint in checkpoints:
        with generating(engine, tensors_of(checkpoint)):
            responses = engine.generate(PROMPTS, GREEDY, max_tokens=MAX_TOKENS, step=0)
        found.append([list(response.token_ids) for response in responses])
    tear_down(engine)
    return found


@pytest.mark.parametrize(("allocator", "enforce_eager"), SETTINGS if ON_DEVICE else SETTINGS[:1])
@pytest.mark.parametrize("variant", TOKENS)
def test_greedy_responses_match_on_cpu_and_cuda(
    tmp_path: Path, variant: str, allocator: str, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    with RankPool("cuda" if ON_DEVICE else "cpu") as pool:
        [found] = pool.run(1, generate, write_two_checkpoints(tmp_path, variant), enforce_eager)
    assert found == TOKENS[variant]


def samples_with_routes(paths: list[Path], enforce_eager: bool) -> list[Generation]:
    """Return two samples of each prompt. Runs on every rank."""
    first, _, bare = paths
    settings = {"dtype": "bfloat16", "gpu_memory_utilization": 0.2, "enforce_eager": enforce_eager}
    engine = start(bare, tp_size=1, routing_replay="engine_scores", **settings)
    with generating(engine, tensors_of(first)):
        groups = draw(
            engine.open_queue(SAMPLED, max_tokens=MAX_TOKENS, step=0, with_routes=True), new_session(SAMPLED.n)
        )
    tear_down(engine)
    return [each for group in groups for each in group.samples if isinstance(each, Generation)]


@pytest.mark.skipif(not ON_DEVICE, reason="tests/ranks/test_rollout_routes.py is the same for the CPU's build")
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_routes_of_cuda_are_nearly_those_of_float32(tmp_path: Path, enforce_eager: bool) -> None:
    """Those of other tokens would agree as often as chance has it: 2 of 8 experts in one of 28 places."""
    paths = write_two_checkpoints(tmp_path, "qwen3_moe")
    with RankPool("cuda") as pool:
        [found] = pool.run(1, samples_with_routes, paths, enforce_eager)
    assert any(each.num_cached for each in found)
    same, errors = list[Tensor](), list[Tensor]()
    for each in found:
        assert each.routes is not None
        experts, scores = each.routes.chunk(2, dim=2)
        expected = scored_by_transformers(paths[0], each)
        same.append(experts.sort(-1).values == expected.topk(experts.shape[2]).indices.sort(-1).values)
        errors.append((scores - expected.gather(-1, experts.long())).abs())
    assert torch.cat([of_sample.flatten() for of_sample in same]).float().mean() > 0.9
    assert torch.cat([of_sample.flatten() for of_sample in errors]).mean() < 0.01
