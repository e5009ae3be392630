"""Requests of a learner to the device, counted: a change must not raise the bars in silence."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.hollow.counters import counted
from tests.support.learners import ACTOR, make_test_learner, update
from tests.support.ranks import RankPool
from tests.support.records import experience
from tests.support.tiny import write_checkpoint

pytestmark = pytest.mark.hollow


BYTES = "requested_bytes.all.allocated"  # in all, whether they are free again or not


def asked(source: Path, max_tokens: int) -> tuple[int, Counter[str]]:
    """Return the micro-batches of an update, and what its third run asks of the device and of torch's memory."""
    from megarl.learner.batching import Budget

    learner, batch = make_test_learner(source, {"dtype": "bfloat16"}), experience()
    budget = Budget(max_tokens=max_tokens, max_sequences=None)
    num_micro_batches = len(learner.forward.divide(learner.spread(batch), budget, None))
    for _ in range(2):  # memory is cached, and groups are connected
        update(learner, [batch], ACTOR, budget)
    before = torch.cuda.memory_stats()[BYTES]
    with counted() as found:
        update(learner, [batch], ACTOR, budget)
    found["bytes"] = torch.cuda.memory_stats()[BYTES] - before
    return num_micro_batches, found


# Triton's kernels are interpreted here, and what torch would compile runs operation by operation: more and smaller
# kernels than on a GPU. The numbers are for comparison with themselves.
PER_MICRO_BATCH = {
    "kernels": 293,
    "products": 27,
    "copies_on_device": 18,
    "copies_to_device": 15,
    "fills": 10,
    "copies_to_host": 0,
    "pageable_copies": 0,
    "waits_for_stream": 0,
    "waits_for_event": 0,
    "waits_for_device": 0,
}
PER_UPDATE = {  # besides those of its micro-batches
    "kernels": 34,
    "allocations": 0,
    "pinned_allocations": 0,
    "pageable_copies": 1,
    "waits_for_stream": 2,
    "collectives": 4,
}


# The last number is the bytes per micro-batch. A copy of the output layer takes 65536 (qwen2) or 32768 (llama).
CASES = [("qwen2", 1, 420_000), ("qwen2", 2, 420_000), ("llama", 2, 213_000)]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool("cuda") as started:
        yield started


@pytest.mark.parametrize(("variant", "num_ranks", "num_bytes"), CASES)
def test_update_makes_no_more_device_calls_than_expected(
    tmp_path: Path, pool: RankPool, variant: str, num_ranks: int, num_bytes: int
) -> None:
    """Several ranks sum their gradients while they compute. The output layer of qwen2 is tied, and llama's is not."""
    source = write_checkpoint(tmp_path, variant)
    bars = PER_MICRO_BATCH | {"bytes": num_bytes}
    results = (pool.run(num_ranks, asked, source, max_tokens) for max_tokens in (1000, 24))
    for (few, of_few), (many, of_many) in zip(*results, strict=True):
        assert many > few
        more = {name: (of_many[name] - of_few[name]) / (many - few) for name in bars}
        assert {name: count for name, count in more.items() if count > bars[name]} == {}
        besides = {name: of_few[name] - few * more.get(name, 0) for name in PER_UPDATE}
        assert {name: count for name, count in besides.items() if count > PER_UPDATE[name]} == {}


def test_host_waits_once_for_each_layer_of_experts(tmp_path: Path, pool: RankPool) -> None:
    """Megatron's dispatcher waits for the tokens of each expert. Nothing else asks the device for them."""
    source = write_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=3)
    (few, of_few), (many, of_many) = (pool.run(1, asked, source, max_tokens)[0] for max_tokens in (1000, 24))
    waits = {name: of_many[name] - of_few[name] for name in of_many if name.startswith(("waits_for", "pageable"))}
    assert {name: count for name, count in waits.items() if count} == {"waits_for_event": 3 * (many - few)}


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


def read_twice(source: Path) -> tuple[int, list[int]]:
    """Return the bytes of an offloaded model that never learns, and what each of two passes brings to the host."""
    from megarl.learner.batching import Budget

    learner = make_test_learner(source, {"dtype": "bfloat16", "param_offload": True}, optim=None)
    found = []
    for _ in range(2):
        with counted() as of_pass:
            learner.infer(learner.spread(experience()), Budget(max_tokens=1000, max_sequences=None))
        found.append(of_pass["bytes_to_host"])
    return sum(parameter.nbytes for model in learner.modules for parameter in model.parameters()), found


def test_frozen_parameters_never_return_to_the_host(tmp_path: Path, pool: RankPool) -> None:
    [(num_bytes, to_host)] = pool.run(1, read_twice, write_checkpoint(tmp_path, "qwen2"))
    assert max(to_host) < num_bytes / 100


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
