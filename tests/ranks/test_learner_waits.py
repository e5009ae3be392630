"""Where a learner's host waits for the device: once at the end of a pass, whatever the number of micro-batches.

A host that waits between two micro-batches leaves the device idle until the next kernels are launched.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.learners import ACTOR, CRITIC, make_test_learner, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.waits import DEVICE, on_device

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {"llama": ("llama", {}), "qwen2": ("qwen2", {})}
OF_THE_CPU = "softmax.py"  # CUDA has kernels for a row of logits
INFER = {"forward.py:join_outputs cpu": 1}
UPDATE = {
    "contributions.py:add_metrics tolist": 1,
    "clip_grads.py:get_grad_norm_fp32 aten::_local_scalar_dense": 1,
}


def test_what_waits_is_found(tmp_path: Path) -> None:
    with on_device() as waits:
        there, here = torch.arange(4.0).to(DEVICE, non_blocking=True), torch.arange(4)
        total = (there * there).sum()
        assert not waits.found
        causes = [
            lambda: total.item(),
            lambda: bool(total > 1),
            lambda: there.tolist(),
            lambda: there[there > 1],
            lambda: there[here],
            lambda: here.repeat_interleave((there > 1).long()),
            lambda: here.to(DEVICE),
            lambda: torch.tensor([1.0], device=DEVICE),
            lambda: there.cpu(),
        ]
        for number, cause in enumerate(causes, 1):
            cause()
            assert waits.found.total() == number
        there.cpu().tolist()
        assert waits.found.total() == len(causes) + 1


def waits_of(source: Path, role: str, max_tokens: int) -> tuple[int, list[Counter[str]]]:
    """Return the number of micro-batches, and the waits of a forward pass, of an update, and of another."""
    from megarl.learner.batching import Budget

    batch, budget = experience(), Budget(max_tokens=max_tokens, max_sequences=None)
    with on_device() as waits:
        learner = make_test_learner(source, {}, role=role)
        num = len(learner.forward.divide(learner.spread(batch), budget, None))
        objective, found = ACTOR if role == "policy" else CRITIC, []
        infer = partial(learner.infer, learner.spread(batch), budget)
        learn = partial(update, learner, [batch], objective, budget)
        for work in (infer, learn, learn):
            waits.found.clear()
            work()
            found.append(Counter({place: n for place, n in waits.found.items() if not place.startswith(OF_THE_CPU)}))
    return num, found


@pytest.mark.parametrize("role", ["policy", "value"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_host_waits_only_at_end_of_pass(pool: RankPool, checkpoints: dict[str, Path], name: str, role: str) -> None:
    numbers = []
    for max_tokens in (24, 1000):
        [(num, found)] = pool.run(1, waits_of, checkpoints[name], role, max_tokens)
        assert found == [INFER, UPDATE, UPDATE]
        numbers.append(num)
    assert numbers[0] > numbers[1] == 1
