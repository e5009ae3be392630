"""torch's sanitizer of CUDA on the hollow device: no kernel reads what another stream still writes.

Streams of the hollow device run in the order of the program, so a missing wait changes no number here. The sanitizer
follows the events and waits that the host asks for, and finds what could change a number on a GPU.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.learners import ACTOR, make_test_learner, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.tiny import write_checkpoint

pytestmark = pytest.mark.hollow

OFFLOADED = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}


def sanitized(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with the sanitizer on."""
    from torch.cuda._sanitizer import cuda_sanitizer

    cuda_sanitizer.enable()
    try:
        return function(*args)
    finally:
        cuda_sanitizer.disable()


def add_on_two_streams(is_awaited: bool) -> float:
    numbers, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    if is_awaited:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        numbers.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    return numbers.sum().item()


def learn(source: Path, section: dict[str, Any]) -> list[dict[str, float]]:
    from megarl.learner.batching import Budget

    learner, batch, budget = make_test_learner(source, section), experience(), Budget(max_tokens=24, max_sequences=None)
    metrics = [update(learner, [batch, batch], ACTOR, budget) for _ in range(2)]
    learner.infer(learner.spread(batch), budget)
    return metrics


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"), "qwen2")


def test_the_sanitizer_finds_a_missing_wait() -> None:
    with RankPool("cuda") as pool:
        assert pool.run(1, sanitized, add_on_two_streams, True) == [8.0]
        with pytest.raises(AssertionError, match="CUDASanitizerErrors"):
            pool.run(1, sanitized, add_on_two_streams, False)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("section", [{}, OFFLOADED], ids=["resident", "offloaded"])
def test_a_learner_waits_for_all_that_it_reads(source: Path, section: dict[str, Any], world_size: int) -> None:
    with RankPool("cuda") as pool:
        for metrics in pool.run(world_size, sanitized, learn, source, section):
            assert metrics[-1]["grad_norm"] > 0
