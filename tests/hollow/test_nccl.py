"""Collectives of the hollow NCCL move real bytes: what they give is what gloo gives. Mistakes are errors."""

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import RankPool

pytestmark = pytest.mark.hollow

SIZE = 4
FLOAT32, SUM = 7, 0  # of NCCL
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def mine(dtype: torch.dtype, rank: int, rows: int = SIZE) -> Tensor:
    """Return [rows, 5] numbers whose sums and products are exact in every type."""
    return (1 + (torch.arange(5 * rows) + rank) % 3).view(rows, 5).to(dtype)


Collective = Callable[[Tensor, Any, int], Tensor]


def reduced(op: Any) -> Collective:
    def compute(x: Tensor, group: Any, rank: int) -> Tensor:
        dist.all_reduce(x, op, group=group)
        return x

    return compute


def gathered(x: Tensor, group: Any, rank: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(SIZE)]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts)


def broadcast(x: Tensor, group: Any, rank: int) -> Tensor:
    dist.broadcast(x, 2, group=group)
    return x


def reduced_to_one(x: Tensor, group: Any, rank: int) -> Tensor:
    dist.reduce(x, 1, group=group)
    return x if rank == 1 else torch.zeros_like(x)


def scattered(x: Tensor, group: Any, rank: int) -> Tensor:
    found = torch.empty_like(x[0])
    dist.scatter(found, [*x] if rank == 3 else None, 3, group=group)
    return found


def exchanged(x: Tensor, group: Any, rank: int) -> Tensor:
    found = torch.empty_like(x)
    dist.all_to_all_single(found, x, group=group)
    return found


def exchanged_unevenly(x: Tensor, group: Any, rank: int) -> Tensor:
    x = x.repeat(SIZE, 1)[: SIZE * (rank + 1)]  # rank r sends r + 1 rows to each rank
    found = x.new_empty(sum(range(1, SIZE + 1)), 5)
    dist.all_to_all_single(found, x, [*range(1, SIZE + 1)], [rank + 1] * SIZE, group=group)
    return found


def passed_round(x: Tensor, group: Any, rank: int) -> Tensor:
    found = torch.empty_like(x)
    sending = dist.P2POp(dist.isend, x, (rank + 1) % SIZE, group)
    receiving = dist.P2POp(dist.irecv, found, (rank - 1) % SIZE, group)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    return found


def passed_down(x: Tensor, group: Any, rank: int) -> Tensor:
    if rank > 0:
        dist.recv(x, rank - 1, group=group)
    x = x + 1
    if rank < SIZE - 1:
        dist.send(x, rank + 1, group=group)
    return x


COLLECTIVES: dict[str, Collective] = {
    "sum": reduced(dist.ReduceOp.SUM),
    "product": reduced(dist.ReduceOp.PRODUCT),
    "maximum": reduced(dist.ReduceOp.MAX),
    "minimum": reduced(dist.ReduceOp.MIN),
    "all_gather": gathered,
    "broadcast": broadcast,
    "reduce": reduced_to_one,
    "scatter": scattered,
    "all_to_all": exchanged,
    "all_to_all_uneven": exchanged_unevenly,
    "pass_round": passed_round,
    "pass_down": passed_down,
}


def differences() -> list[str]:
    """Return which collectives give other numbers than those of gloo. Runs on every rank."""
    from megarl.distributed.exchange import host_group

    rank, found = dist.get_rank(), []
    for name, collective in COLLECTIVES.items():
        for dtype in DTYPES:
            ours = collective(mine(dtype, rank).cuda(), None, rank)
            expected = collective(mine(dtype, rank), host_group(), rank)
            if not torch.equal(ours.cpu(), expected):
                found.append(f"{name} of {dtype}: {ours.cpu()} instead of {expected}")
    return found


def of_ranks() -> dict[str, Any]:
    """Return what gloo does not have: averages, reduced parts, and groups that are parts of the world."""
    rank = dist.get_rank()
    average, part = mine(torch.float32, rank).cuda(), torch.empty(1, 5, device="cuda")
    dist.all_reduce(average, dist.ReduceOp.AVG)
    dist.reduce_scatter_single(part, mine(torch.float32, rank).cuda())
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    of_pair = torch.tensor([rank], device="cuda")
    dist.all_reduce(of_pair, group=pairs[rank % 2])
    return {"average": average.cpu(), "part": part.cpu(), "pair": of_pair.item()}


def in_groups() -> list[float]:
    """Return sums of collectives that are called in groups, after many of them. Runs on every rank."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    x = [torch.ones(3, device="cuda") for _ in range(3)]
    for _ in range(20):
        with _coalescing_manager(async_ops=True) as manager:
            for each in x:
                dist.all_reduce(each.fill_(1.0))
        manager.wait()
    parts = [torch.empty(rank + 1, device="cuda") for rank in range(SIZE)]
    for _ in range(20):
        dist.all_gather(parts, torch.full((dist.get_rank() + 1,), 2.0, device="cuda"))
    return [each.sum().item() for each in (*x, *parts)]


def captured() -> list[Tensor]:
    """Return what two launches of a graph with collectives give. Runs on every rank."""
    rank = dist.get_rank()
    x = mine(torch.float32, rank).cuda()
    total = torch.zeros_like(x)
    dist.all_reduce(torch.ones(1, device="cuda"))  # makes the communicator
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(total.copy_(x * 2))
        doubled = total * 2
    found = []
    for _ in range(2):
        graph.replay()
        found.append(doubled.cpu())
        x += 1
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool("cuda") as made:
        yield made


def test_collectives_give_what_gloo_gives(pool: RankPool) -> None:
    assert pool.run(SIZE, differences) == [[]] * SIZE


def test_averages_parts_and_groups(pool: RankPool) -> None:
    everyone = torch.stack([mine(torch.float32, rank) for rank in range(SIZE)])
    for rank, found in enumerate(pool.run(SIZE, of_ranks)):
        assert torch.equal(found["average"], everyone.mean(0))
        assert torch.equal(found["part"], everyone.sum(0)[rank : rank + 1])
        assert found["pair"] == (2 if rank % 2 == 0 else 4)


def test_a_group_of_collectives_may_be_read_late(pool: RankPool) -> None:
    assert pool.run(SIZE, in_groups) == [[12.0] * 3 + [2.0 * (rank + 1) for rank in range(SIZE)]] * SIZE


def test_a_captured_collective_is_done_at_each_launch(pool: RankPool) -> None:
    everyone = torch.stack([mine(torch.float32, rank) for rank in range(SIZE)]).sum(0)
    for first, second in pool.run(SIZE, captured):
        assert torch.equal(first, 4 * everyone)
        assert torch.equal(second, 4 * (everyone + SIZE))


class UniqueId(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 128)]


def test_rank_may_exit_before_slower_rank_receives_message() -> None:
    """The slow rank is in a group: it has posted both its parts, and first waits for a rank that comes late."""
    nccl, ended = ctypes.CDLL("libnccl.so.2"), Event()
    pair, late = UniqueId(), UniqueId()
    numbers = [torch.full((1,), float(rank), device=f"cuda:{rank}") for rank in range(3)]
    for unique_id in (pair, late):
        assert nccl.ncclGetUniqueId(ctypes.byref(unique_id)) == 0

    def join(unique_id: UniqueId, device: int, rank: int) -> ctypes.c_void_p:
        torch.cuda.set_device(device)
        communicator = ctypes.c_void_p()
        assert nccl.ncclCommInitRank(ctypes.byref(communicator), 2, unique_id, rank) == 0
        return communicator

    def add(communicator: ctypes.c_void_p, numbers: Tensor) -> int:
        place = ctypes.c_void_p(numbers.data_ptr())
        status: int = nccl.ncclAllReduce(place, place, ctypes.c_size_t(1), FLOAT32, SUM, communicator, None)
        return status

    def quick() -> int:
        communicator = join(pair, 0, 0)
        status = add(communicator, numbers[0])
        nccl.ncclCommDestroy(communicator)
        ended.set()
        return status

    def slow() -> int:
        of_pair, of_late = join(pair, 1, 1), join(late, 1, 0)
        nccl.ncclGroupStart()
        add(of_late, torch.ones(1, device="cuda:1"))
        add(of_pair, numbers[1])
        status: int = nccl.ncclGroupEnd()
        return status

    def last() -> int:
        communicator = join(late, 2, 1)
        ended.wait()
        return add(communicator, numbers[2])

    with ThreadPoolExecutor(3) as threads:
        assert [done.result() for done in [threads.submit(part) for part in (quick, slow, last)]] == [0, 0, 0]
    assert [number.item() for number in numbers] == [1.0, 1.0, 3.0]


def sizes_differ() -> None:
    dist.all_reduce(torch.ones(3 + dist.get_rank(), device="cuda"))


def calls_differ() -> None:
    x = torch.ones(2, device="cuda")
    if dist.get_rank():
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)


def both_use_one_device() -> None:
    torch.cuda.set_device(0)
    dist.all_reduce(torch.ones(2, device="cuda"))


def sends_memory_of_the_host() -> None:
    dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (sizes_differ, "invalid usage"),
        (calls_differ, "invalid usage"),
        (both_use_one_device, "Duplicate GPU|invalid usage"),
        (sends_memory_of_the_host, "No backend type associated with device type cpu"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_mistake_is_an_error(mistake: Callable[[], None], message: str) -> None:
    with RankPool("cuda") as pool, pytest.raises(AssertionError, match=message):
        pool.run(2, mistake)
