"""What replicas tell each other of a window: numbers of samples, no token, and errors."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from megarl.batch import Generation, RemoteSample, float32, int32
from megarl.rollout.window import Window, exchange
from tests.support.ranks import RankPool
from tests.support.windows import each_window

LONG = Generation(
    7, int32([1]) * 1000, float32([-1.0]) * 1000, truncated=True, weight_versions=int32([3]) * 1000, sample=1
)
SILENT = Generation(4, int32([5, 6]), None, truncated=False, complete=False)
EMPTY = Generation(2, int32(), float32(), truncated=False, sample=3, complete=False)
WINDOWS = [
    Window([LONG, SILENT], num_steps=16, num_running=30),
    Window([], num_steps=2, waiting=[8, 9]),
    Window([EMPTY]),
]


def tell(tp_size: int) -> Sequence[Window]:
    """Exchange the windows of three replicas of `tp_size` ranks."""
    rank = dist.get_rank()
    return each_window(exchange(lambda: WINDOWS[rank // tp_size], range(rank % tp_size, 3 * tp_size, tp_size)))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_replicas_know_samples_without_their_tokens(pool: RankPool, tp_size: int) -> None:
    for rank, found in enumerate(pool.run(3 * tp_size, tell, tp_size)):
        for replica, (window, told) in enumerate(zip(found, WINDOWS, strict=True)):
            if replica == rank // tp_size:
                assert window == told
                continue
            samples = [sample.as_remote(replica) for sample in told.finished]
            assert list(window.finished) == samples
            assert all(isinstance(sample, RemoteSample) or sample == EMPTY for sample in samples)
            assert window.counts() == told.counts()
            assert list(window.waiting) == list(told.waiting)


def fail_on(failing: list[int]) -> str:
    rank = dist.get_rank()

    def work() -> Window:
        if rank in failing:
            raise ValueError(f"replica {rank}")
        return Window(())

    with pytest.raises(ValueError) as caught:
        exchange(work, range(3))
    return str(caught.value)


def test_failure_of_replica_is_raised_on_all(pool: RankPool) -> None:
    assert pool.run(3, fail_on, [2]) == ["replica 2"] * 3
    assert pool.run(3, fail_on, [1, 2]) == ["replica 1", "replica 1", "replica 2"]


def content_of(length: int) -> Any:
    drawn = Generation(0, int32([1]) * length, float32([-1.0]) * length, truncated=False)
    return Window([drawn]).content()


def test_content_of_window_ignores_length_of_samples() -> None:
    assert content_of(1).shape == content_of(100_000).shape
