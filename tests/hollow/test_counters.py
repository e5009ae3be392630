"""Requests of a learner to the device, counted: a change must not raise the bars in silence."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.hollow.counters import counted
from tests.support.learners import ACTOR, make_test_learner, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.tiny import write_checkpoint

pytestmark = pytest.mark.hollow


def asked(source: Path, max_tokens: int) -> tuple[int, Counter[str]]:
    """Return the micro-batches of an update, and what its third run asks of the device."""
    from megarl.learner.batching import Budget

    learner, batch = make_test_learner(source, {"dtype": "bfloat16"}), experience()
    budget = Budget(max_tokens=max_tokens, max_sequences=None)
    num_micro_batches = len(learner.forward.divide(learner.spread(batch), budget, None))
    for _ in range(2):  # memory is cached, and groups are connected
        update(learner, [batch], ACTOR, budget)
    with counted() as found:
        update(learner, [batch], ACTOR, budget)
    return num_micro_batches, found


# Triton's kernels are interpreted here, and what torch would compile runs operation by operation: more and smaller
# kernels than on a GPU. The numbers are for comparison with themselves.
PER_MICRO_BATCH = {
    "kernels": 298,
    "products": 27,
    "copies_on_device": 18,
    "copies_to_device": 19,
    "fills": 10,
    "copies_to_host": 0,
    "pageable_copies": 0,
    "waits_for_stream": 0,
    "waits_for_event": 0,
    "waits_for_device": 0,
}
PER_UPDATE = {"allocations": 0, "pinned_allocations": 0, "pageable_copies": 1, "waits_for_stream": 3, "collectives": 4}


def test_update_makes_no_more_device_calls_than_expected(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, "qwen2")
    with RankPool("cuda") as pool:
        [(few, of_few)] = pool.run(1, asked, source, 1000)
        [(many, of_many)] = pool.run(1, asked, source, 24)
    assert many > few
    more = {name: (of_many[name] - of_few[name]) / (many - few) for name in PER_MICRO_BATCH}
    assert {name: count for name, count in more.items() if count > PER_MICRO_BATCH[name]} == {}
    assert {name: of_few[name] for name, most in PER_UPDATE.items() if of_few[name] > most} == {}


def learn_with(source: Path, kept_share: float) -> tuple[int, dict[str, float]]:
    """Return the products and the metrics of an update whose logits may take a share of the unused memory."""
    from megarl.learner import heads
    from megarl.learner.batching import Budget

    heads.KEPT_BYTES = 0
    heads.KEPT_SHARE = kept_share
    learner = make_test_learner(source, {"dtype": "bfloat16"})
    with counted() as found:
        metrics = update(learner, [experience()], ACTOR, Budget(max_tokens=1000, max_sequences=None))
    return found["products"], metrics


def test_logits_are_kept_if_device_memory_suffices(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, "qwen2")
    with RankPool("cuda") as pool:
        [(products, metrics)] = pool.run(1, learn_with, source, 0.5)
        [(products_without_memory, metrics_without_memory)] = pool.run(1, learn_with, source, 0.0)
    assert products == products_without_memory - 1
    assert metrics == metrics_without_memory


def test_host_calls_are_counted_including_unimplemented_ones() -> None:
    left, host = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
    torch.cuda.synchronize()
    with counted() as found:
        product = left @ left
        product.add_(1)
        product.cpu()
        left.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
    assert product.sum().item() == 16 * 5
    expected = {"products": 1, "kernels": 1, "copies_to_host": 1, "copies_to_device": 1, "waits_for_device": 1}
    assert {name: found[name] for name in expected} == expected
    assert found["bytes_to_device"] == found["bytes_to_host"] == 64
    assert found["unwritten cublasSetStream_v2"] >= 1
