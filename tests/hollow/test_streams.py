"""torch's sanitizer of CUDA on the hollow device: no kernel reads what another stream still writes.

Streams of the hollow device run in the order of the program, so a missing wait changes no number here. The sanitizer
follows the events and waits that the host asks for, and finds what could change a number on a GPU.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.rollout.config import SamplingSection
from tests.support.engines import PROMPTS, start, tear_down, write_two_checkpoints
from tests.support.learners import ACTOR, make_test_learner, update
from tests.support.pairs import Pair
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


def sync_and_draw(pair: Pair, written: torch.Tensor | None = None) -> int:
    """Return the number of samples that the engine draws between a sync and its sleep, while `written` is written."""
    from megarl.weight_sync.transfer import send_weights

    engine, side = pair.engine, torch.cuda.Stream()
    with engine.receive_weights() as destination:
        send_weights(pair.learner, destination, pair.reshard())
    with engine.generating():
        if written is not None:
            with torch.cuda.stream(side):
                written.mul_(1)
        return len(engine.generate(PROMPTS, SamplingSection(), max_tokens=4, step=0))


def use_engine(paths: list[Path]) -> int:
    """Return the samples of two rounds with the sanitizer on, and then let it find a missing wait."""
    first, _, bare = paths
    settings = {"dtype": "bfloat16", "gpu_memory_utilization": 0.2, "enforce_eager": True}
    engine = start(bare, tp_size=1, **settings)
    pair = Pair(make_test_learner(first, {"dtype": "bfloat16"}), engine)
    num_samples = sum(sanitized(sync_and_draw, pair) for _ in range(2))
    model = engine._llm.collective_rpc(lambda worker: worker.get_model())[0]
    with pytest.raises(RuntimeError, match="CUDASanitizerErrors"):
        sanitized(sync_and_draw, pair, model.lm_head.weight.data)
    tear_down(engine)
    return num_samples


def test_an_engine_waits_for_all_that_it_reads(tmp_path: Path) -> None:
    with RankPool("cuda") as pool:
        assert pool.run(1, use_engine, write_two_checkpoints(tmp_path, "qwen3")) == [2 * len(PROMPTS)]
