"""Ranks exchange results and errors."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from megarl.distributed import exchange
from megarl.distributed.agreement import agree
from megarl.distributed.exchange import (
    MOST_BYTES_IN_PAIRS,
    all_reduce,
    begin_receiving,
    begin_sending,
    from_first_rank,
    host_group,
    join_world,
    on_each_rank,
    on_first_rank,
    sum_of_ranks,
    to_first_rank,
    together,
    wait_for_all,
)
from megarl.training import steps
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks


class TwoPartError(Exception):
    """An error that can be pickled, but not unpickled, as in many libraries."""

    def __init__(self, place: str, cause: str) -> None:
        super().__init__(f"{place}: {cause}")


class LockedError(Exception):
    """An error that cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.handle = lambda: None


class SilentError(LockedError):
    """An error without a text, which cannot be pickled either."""

    def __str__(self) -> str:
        raise self


def told(faulty: dict[int, Exception], share: Callable[[Callable[[], int]], object] = together) -> tuple[str, str]:
    """Return type and message of the error that `share` raises if the given ranks fail."""

    def compute() -> int:
        if error := faulty.get(dist.get_rank()):
            raise error
        return 0

    try:
        share(compute)
    except Exception as error:
        assert together(dist.get_rank) == [0, 1, 2]  # every rank is still there and at the same place
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def two_parts() -> Any:
    return told({1: TwoPartError("disk", "full")})


def locked() -> Any:
    return told({1: LockedError("in use")})


def silent() -> Any:
    try:
        return told({1: SilentError("in use")})
    except SilentError:  # the rank's own error, which has no text
        return "its own"


def results_of_each_rank() -> tuple[int, int]:
    """Return a rank's own result, and the objects that travelled for it."""
    with patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gather:
        return on_each_rank(dist.get_rank), gather.call_count


def result_of_first_rank() -> tuple[int, int]:
    """Return the result of the first rank, and the times that a rank has room for the results of all."""
    with patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gather:
        return on_first_rank(lambda: 7 + dist.get_rank()), gather.call_count


def first_of_some_ranks() -> tuple[int, str] | None:
    """Return the result of the first of ranks 1 and 2, and the error that its own error becomes on a rank."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    found = on_first_rank(dist.get_rank, group=group)
    with pytest.raises(Exception, match="disk: full") as caught:
        on_first_rank(fail, group=group)
    return found, type(caught.value).__name__


def fail() -> int:
    raise TwoPartError("disk", "full")


def brought_to_first() -> tuple[list[str], list[str]]:
    """Bring objects of very different sizes, and then none."""
    rank = dist.get_rank()
    return to_first_rank([f"{rank}-{number}" * 100**rank for number in range(3 - rank)]), to_first_rank([])


def exchanged_in_pairs() -> tuple[list[str], float, int]:
    """Bring objects to the first of ranks 0 and 2, or 1 and 3, a number from it, and find the largest rank of both."""
    rank = dist.get_rank()
    group = [dist.new_group([first, first + 2]) for first in range(2)][rank % 2]
    number, largest = torch.tensor([-float(rank)]), torch.tensor(rank)
    from_first_rank(number, group=group)
    all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return to_first_rank([f"{rank}" * 10**rank], group=group), float(number), int(largest)


def reduced() -> tuple[list[int], int, int, int]:
    """Return a sum, a largest number and this rank's messages for both, and what another message brings meanwhile."""
    rank, size = dist.get_rank(), dist.get_world_size()
    other = torch.empty(1, dtype=torch.int64)
    sending = begin_sending(torch.tensor([100 + rank]), (rank + 1) % size)
    sums, largest = torch.tensor([rank**2, 1]), torch.tensor(rank % 5)
    with patch.object(dist, "isend", Mock(wraps=dist.isend)) as sent:
        all_reduce(sums)
        all_reduce(largest, op=dist.ReduceOp.MAX)
    begin_receiving(other, (rank - 1) % size).wait()
    sending.wait()
    return sums.tolist(), int(largest), sent.call_count, int(other)


def reduced_around() -> bool:
    """Return whether many numbers are added, by the collective that sends each rank the fewest bytes."""
    numbers = torch.full((MOST_BYTES_IN_PAIRS // 8 + 1,), 1 + dist.get_rank())
    with patch.object(dist, "isend", side_effect=AssertionError("in pairs")):
        all_reduce(numbers)
    return bool((numbers == 6).all())


def reduced_otherwise() -> None:
    """Reduce by an operation that no caller needs."""
    with pytest.raises(ValueError, match="by SUM or MAX, not by "):
        all_reduce(torch.tensor(1), op=dist.ReduceOp.PRODUCT)


def exceptions_as_answers() -> list[str]:
    return [str(answer) for answer in together(lambda: ValueError(f"rank {dist.get_rank()}"))]


def over_five_groups() -> tuple[float, list[int]]:
    """Return a sum that each of five groups doubles, and how each thread that waits for messages is scheduled."""
    total = torch.ones(1)
    for group in [dist.new_group([0, 1]) for _ in range(5)]:
        dist.all_reduce(total, group=group)
    threads = [
        int(task.name)
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().strip() == "gloo_tcp_loop"
    ]
    return total.item(), [os.sched_getscheduler(thread) for thread in threads]


def over_group_without_the_policy() -> float:
    """Return a sum of two ranks, in a group made while the kernel refuses to schedule threads in another way."""
    total = torch.ones(1)
    with patch.object(os, "sched_setscheduler", side_effect=PermissionError):
        dist.all_reduce(total, group=dist.new_group([0, 1]))
    return total.item()


def leave_world() -> None:
    """Destroy the default group of the pool when every rank has connected."""
    dist.barrier()
    dist.destroy_process_group()


def connected_late(store: Path) -> float:
    """Return the sum in a world whose ranks connect when they first talk."""
    rank, size = dist.get_rank(), dist.get_world_size()
    leave_world()
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    join_world(store=dist.FileStore(str(store), size), rank=rank, world_size=size, timeout=timedelta(minutes=5))
    return over_five_groups()[0]


def of_cuda(store: Path) -> Any:
    """Talk in a world as on CUDA; its default group, torch's `fake`, brings nothing to anyone."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - knows the backend

    from megarl.rollout.segments import claim

    rank, size, start = dist.get_rank(), dist.get_world_size(), dist.init_process_group
    leave_world()
    with (
        patch.object(exchange, "on_cuda", lambda: True),
        patch.object(dist, "init_process_group", lambda backend, **place: start({"nccl": "fake"}[backend], **place)),
    ):
        place = {"store": dist.FileStore(str(store), size), "rank": rank, "world_size": size}
        join_world(**place, timeout=timedelta(minutes=5))
    backends = dist.get_backend(), dist.get_backend(dist.new_group()), dist.get_backend(host_group())
    agree({"same": 1})
    wait_for_all()
    prefix = claim(store.parent)
    with pytest.raises(ValueError, match="other: 0 on rank 0, 1 on rank 1"):
        agree({"other": rank})
    return backends, together(dist.get_rank), together(lambda: prefix)


def test_host_data_use_only_gloo_group_on_cuda(tmp_path: Path) -> None:
    with RankPool() as pool:  # of its own: its ranks end in a world that is not the pool's
        results = pool.run(2, of_cuda, tmp_path / "store")
    for backends, ranks, (first, second) in results:
        assert backends == ("fake", "fake", "gloo")
        assert ranks == [0, 1]
        assert first == second


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists the threads of a process in /proc")
def test_all_groups_share_one_thread_that_never_preempts(pool: RankPool) -> None:
    assert pool.run(2, over_five_groups) == [(32.0, [os.SCHED_BATCH])] * 2


def test_groups_form_where_kernel_refuses_policies(pool: RankPool) -> None:
    assert pool.run(2, over_group_without_the_policy) == [2.0] * 2


def test_ranks_may_connect_when_they_first_talk(tmp_path: Path) -> None:
    with RankPool() as pool:
        assert pool.run(2, connected_late, tmp_path / "store") == [32.0] * 2


def test_every_rank_learns_all_answers_in_rank_order(pool: RankPool) -> None:
    assert pool.run(3, together, dist.get_rank) == [[0, 1, 2]] * 3
    assert pool.run(2, together, dist.get_rank) == [[0, 1]] * 2


@pytest.mark.parametrize("share", [together, on_each_rank, sum_of_ranks])
def test_error_on_one_rank_is_raised_on_all(pool: RankPool, share: Any) -> None:
    assert pool.run(3, told, {2: ValueError("row 7")}, share) == [("ValueError", "row 7")] * 3


@pytest.mark.parametrize("share", [together, on_each_rank, sum_of_ranks])
def test_rank_raises_own_error_or_first_of_several(pool: RankPool, share: Any) -> None:
    errors = {1: ValueError("row 7"), 2: KeyError("prompt")}
    assert pool.run(3, told, errors, share) == [
        ("ValueError", "row 7"),
        ("ValueError", "row 7"),
        ("KeyError", "'prompt'"),
    ]


def test_an_error_that_cannot_travel_arrives_in_words(pool: RankPool) -> None:
    there = ("RuntimeError", "TwoPartError: disk: full")
    assert pool.run(3, two_parts) == [there, ("TwoPartError", "disk: full"), there]
    there = ("RuntimeError", "LockedError: in use")
    assert pool.run(3, locked) == [there, ("LockedError", "in use"), there]


def test_error_without_text_reaches_all_ranks(pool: RankPool) -> None:
    there = ("RuntimeError", "SilentError")
    assert pool.run(3, silent) == [there, "its own", there]


@pytest.mark.parametrize(("num_ranks", "most_messages"), [(2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (8, 3)])
def test_ranks_reduce_numbers_in_pairs(pool: RankPool, num_ranks: int, most_messages: int) -> None:
    squares = sum(rank**2 for rank in range(num_ranks))
    found = pool.run(num_ranks, reduced)
    assert [numbers[:2] for numbers in found] == [([squares, num_ranks], min(num_ranks - 1, 4))] * num_ranks
    assert max(num_messages for *_, num_messages, _ in found) == 2 * most_messages
    assert [other for *_, other in found] == [100 + (rank - 1) % num_ranks for rank in range(num_ranks)]


def test_many_numbers_pass_around_all_ranks(pool: RankPool) -> None:
    assert pool.run(3, reduced_around) == [True] * 3


def test_other_reductions_are_refused(pool: RankPool) -> None:
    pool.run(2, reduced_otherwise)


def test_every_rank_learns_the_sum(pool: RankPool) -> None:
    assert pool.run(3, sum_of_ranks, dist.get_rank) == [3, 3, 3]


def test_own_results_do_not_travel(pool: RankPool) -> None:
    assert pool.run(3, results_of_each_rank) == [(0, 0), (1, 0), (2, 0)]


def test_result_of_first_rank_travels_once(pool: RankPool) -> None:
    assert pool.run(3, result_of_first_rank) == [(7, 0)] * 3


def test_first_of_some_ranks_tells_the_others(pool: RankPool) -> None:
    assert pool.run(3, first_of_some_ranks) == [None, (1, "TwoPartError"), (1, "RuntimeError")]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_objects_of_ranks_come_to_the_first(pool: RankPool, num_ranks: int) -> None:
    objects = ["0-0", "0-1", "0-2", "1-0" * 100, "1-1" * 100, "2-0" * 10000][: 3 if num_ranks == 1 else 6]
    assert pool.run(num_ranks, brought_to_first) == [(objects, []), *[([], [])] * (num_ranks - 1)]


def test_an_answer_may_be_an_exception(pool: RankPool) -> None:
    assert pool.run(3, exceptions_as_answers) == [["rank 0", "rank 1", "rank 2"]] * 3


def test_straggler_wait_accumulates_until_it_is_read() -> None:
    clock = Mock(perf_counter=Mock(side_effect=[1.0, 3.5, 10.0, 10.25]))
    with patch.object(exchange, "time", clock), patch.object(exchange, "all_reduce"):
        exchange.seconds_waited()
        wait_for_all()
        wait_for_all()
    assert exchange.seconds_waited() == 2.75
    assert exchange.seconds_waited() == 0.0


def of_all_ranks() -> dict[str, float]:
    """Return the metrics of two ranks. The first waits, and the second holds more memory."""
    rank = dist.get_rank()
    peaks = {"perf/max_host_memory_gb": 1.0 + rank}
    with (
        patch.object(steps, "peak_memory", return_value=peaks),
        patch.object(steps, "seconds_waited", lambda: 1 - rank),
        patch.object(dist, "all_gather_object", side_effect=AssertionError("an object of each rank")),
    ):
        return steps._of_all_ranks()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_step_reports_maximum_memory_and_mean_wait(pool: RankPool, num_ranks: int) -> None:
    lost = {"perf/time_lost_to_stragglers": 0.5} if num_ranks > 1 else {}
    assert pool.run(num_ranks, of_all_ranks) == [{"perf/max_host_memory_gb": float(num_ranks)} | lost] * num_ranks


def test_ranks_of_a_group_exchange_alone(pool: RankPool) -> None:
    texts = [f"{rank}" * 10**rank for rank in range(4)]
    assert pool.run(4, exchanged_in_pairs) == [
        (texts[0::2], 0.0, 2),
        (texts[1::2], -1.0, 3),
        ([], 0.0, 2),
        ([], -1.0, 3),
    ]
