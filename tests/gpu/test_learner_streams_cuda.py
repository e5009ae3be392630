"""On a GPU: what runs beside the computation changes no number, and the host waits at the end of a pass alone."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.learner.fused import has_transformer_engine
from tests.support.learners import ACTOR, make_test_learner, outputs_of_all, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.tiny import write_checkpoint

pytestmark = pytest.mark.gpu

WAITS = {"contributions.py": 1, "clip_grads.py": 1, "forward.py": 1}
OFFLOADED = {"optimizer_offload": True, "grad_offload": True, "param_offload": True}


def learn(source: Path, section: dict[str, Any]) -> tuple[list[dict[str, float]], torch.Tensor]:
    """Return the metrics of three updates of two mini-batches, and the log-probabilities after them."""
    from megarl.learner.batching import Budget

    learner, batch = make_test_learner(source, section), experience()
    budget = Budget(max_tokens=24, max_sequences=None)
    metrics = [update(learner, [batch, batch], ACTOR, budget) for _ in range(3)]
    return metrics, outputs_of_all(learner, batch, budget).log_probs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_optimizer_returns_in_time(tmp_path: Path, dtype: str) -> None:
    source = write_checkpoint(tmp_path, "qwen2")
    with RankPool("cuda") as pool:
        [(stays, expected)] = pool.run(1, learn, source, {"dtype": dtype})
        [(rests, found)] = pool.run(1, learn, source, {"dtype": dtype} | OFFLOADED)
    for ours, theirs in zip(rests, stays, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_ranks_that_overlap_learn_as_one(tmp_path: Path) -> None:
    if (num_devices := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs two devices, and this machine has {num_devices}")
    source = write_checkpoint(tmp_path, "qwen2")
    with RankPool("cuda") as pool:
        [(alone, expected)] = pool.run(1, learn, source, {})
        for together, found in pool.run(2, learn, source, {}):
            for ours, theirs in zip(together, alone, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def waits(source: Path, section: dict[str, Any], max_tokens: int) -> Counter[str]:
    """Return how often each file makes the host wait for the device in an update and a forward pass."""
    from megarl.learner.batching import Budget

    learner, batch = make_test_learner(source, section), experience()
    budget = Budget(max_tokens=max_tokens, max_sequences=None)

    def work() -> None:
        update(learner, [batch], ACTOR, budget)
        outputs_of_all(learner, batch, budget)

    work()  # kernels are compiled and groups connected
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        work()
        torch.cuda.set_sync_debug_mode("default")
    return Counter(Path(found.filename).name for found in caught if "synchronizing CUDA" in str(found.message))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # attention takes other kernels
def test_host_waits_follow_passes_not_micro_batches(tmp_path: Path, dtype: str, num_ranks: int) -> None:
    if (num_devices := torch.cuda.device_count()) < num_ranks:
        pytest.skip(f"needs {num_ranks} devices, and this machine has {num_devices}")
    source = write_checkpoint(tmp_path, "qwen2")
    section = {"dtype": dtype, "context_parallel_size": num_ranks}
    with RankPool("cuda") as pool:
        few, many = (pool.run(num_ranks, waits, source, section, max_tokens) for max_tokens in (1000, 24))
    assert many == few
    if not has_transformer_engine():
        assert few == [WAITS] * num_ranks
