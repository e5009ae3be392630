"""Asynchronous work: all ranks continue together, or fail together."""

from pathlib import Path
from threading import Event, current_thread, main_thread

import pytest
import torch.distributed as dist

from megarl.checkpoint.background import Background, Task
from tests.support.ranks import RankPool


def count(diary: list[object], *, wait: Event | None = None) -> Task:
    """Do two pieces of work; the first waits. Notes the results of all ranks."""

    def work(number: int) -> int:
        assert current_thread() is not main_thread()
        if wait:
            wait.wait()
        return 10 * number + dist.get_rank()

    first = yield lambda: work(1)
    diary.append(first)
    assert current_thread() is main_thread()
    dist.barrier()
    diary.append((yield lambda: work(2)))


def goes_on_when_all_ranks_are_done() -> list[object]:
    diary: list[object] = []
    background, gate = Background(), Event()
    background.advance()  # nothing is under way
    background.start(count(diary, wait=gate if dist.get_rank() == 1 else None))
    for _ in range(5):
        background.advance()  # rank 0 finishes soon, rank 1 does not
    before = list(diary)
    gate.set()
    background.finish()
    background.finish()
    return [before, *diary]


def test_a_task_continues_when_all_ranks_have_finished(pool: RankPool) -> None:
    assert pool.run(2, goes_on_when_all_ranks_are_done) == 2 * [[[], [10, 11], [20, 21]]]


def a_second_task_waits_for_the_first() -> list[object]:
    diary: list[object] = []
    background = Background()
    background.start(count(diary))
    background.start(count(diary))
    assert diary == [[10, 11], [20, 21]]
    while len(diary) < 4:
        background.advance()
    return diary


def test_a_second_task_waits_for_the_first(pool: RankPool) -> None:
    assert pool.run(2, a_second_task_waits_for_the_first) == 2 * [2 * [[10, 11], [20, 21]]]


def fails_on_all_ranks(directory: Path) -> list[object]:
    def write() -> None:
        (directory / "there" if dist.get_rank() == 0 else directory / "not there" / "file").write_text("")

    def task() -> Task:
        yield write
        raise AssertionError("the task continued")

    background = Background()
    background.start(task())
    with pytest.raises(FileNotFoundError, match="not there"):
        while True:
            background.advance()
    background.finish()  # the failed task has ended
    diary: list[object] = []
    background.start(count(diary))
    background.finish()
    return diary


def test_a_task_fails_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, fails_on_all_ranks, tmp_path) == 2 * [[[10, 11], [20, 21]]]
