"""Exchange of small host-side objects among ranks: generated samples, scores, errors."""

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.gloo import share_device
from megarl.platform.device import on_cuda

T = TypeVar("T")


REDUCED = 1
"""The tag of the messages of `all_reduce`."""
GATHERED = 2
"""The tag of the messages of `all_gather`."""
MOST_BYTES_IN_PAIRS = 1 << 16
"""Of the numbers that `all_reduce` exchanges in pairs."""
_NOTHING = torch.empty(0, dtype=torch.uint8)
_host_groups: dict[dist.ProcessGroup | None, dist.ProcessGroup] = {}  # of a world of NCCL
_timeout = timedelta(minutes=30)  # of the world, when it is joined
_waited = 0.0  # seconds, since `seconds_waited` was last called


def join_world(*, timeout: timedelta, **place: Any) -> None:
    """Create torch's default process group: of gloo on the CPU, of NCCL on CUDA, with another group of gloo.

    Every other group takes the backend of the default group, and a group of gloo connects each of its ranks with each
    other. So NCCL is the only backend of all groups but one.

    Args:
        timeout: after which a collective is an error if a rank has not joined it.
        place: the rendezvous, as `torch.distributed.init_process_group` takes it.
    """
    global _timeout
    _timeout = timeout
    share_device()
    dist.init_process_group("nccl" if on_cuda() else "gloo", timeout=timeout, **place)
    if on_cuda():
        _host_groups[dist.group.WORLD] = dist.new_group(backend="gloo", timeout=timeout)


def world_timeout() -> timedelta:
    """Return the timeout of the world, for other groups: torch gives a new group 30 minutes."""
    return _timeout


def begin_sending(content: Tensor, rank: int, *, tag: int = 0) -> dist.Work:
    """Begin to send a tensor of the host to a rank; the tensor must stay as it is until the work is done.

    A rank receives messages of one tag in the order in which they were sent.
    """
    work = dist.isend(content, rank, group=host_group(), tag=tag)
    assert work is not None, "this rank is in the group"
    return work


def begin_receiving(content: Tensor, rank: int, *, tag: int = 0) -> dist.Work:
    """Begin to fill a tensor of the host with what a rank sends."""
    work = dist.irecv(content, rank, group=host_group(), tag=tag)
    assert work is not None, "this rank is in the group"
    return work


def host_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks for data in host memory: gloo, even if device tensors travel by NCCL."""
    return _host_groups.get(dist.group.WORLD, dist.group.WORLD)


def all_reduce(numbers: Tensor, op: Any = dist.ReduceOp.SUM, *, group: dist.ProcessGroup | None = None) -> None:
    """Reduce numbers in host memory over all ranks of `group`, by default over all, in place. Collective.

    The order of the ranks must not matter, as for integers. For few numbers ranks exchange in pairs, so that the
    messages of a rank grow with the logarithm of the ranks (Thakur et al. 2005, "Optimization of Collective
    Communication Operations in MPICH", section 4.5: recursive doubling). Those of gloo's own collective grow with the
    ranks, but have fewer bytes in sum (D450).

    Args:
        numbers: contiguous, of the same shape and type on all ranks.
        op: SUM or MAX.
        group: of gloo, with this rank.

    Raises:
        ValueError: `op` is another.
    """
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        raise ValueError(f"ranks reduce numbers by SUM or MAX, not by {op}")
    if numbers.nbytes > MOST_BYTES_IN_PAIRS:
        dist.all_reduce(numbers, op, group=group or host_group())
        return
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    place = ranks.index(dist.get_rank())
    paired = 1 << (len(ranks).bit_length() - 1)  # the most ranks that are a power of two
    if place >= paired:
        begin_sending(numbers, ranks[place - paired], tag=REDUCED).wait()
        begin_receiving(numbers, ranks[place - paired], tag=REDUCED).wait()
        return
    stands_for = ranks[place + paired] if place + paired < len(ranks) else None
    if stands_for is not None:
        _reduce(numbers, stands_for, op)
    distance = 1
    while distance < paired:
        partner = ranks[place ^ distance]
        _reduce(numbers, partner, op, sending=begin_sending(numbers, partner, tag=REDUCED))
        distance *= 2
    if stands_for is not None:
        begin_sending(numbers, stands_for, tag=REDUCED).wait()


def wait_for_all() -> None:
    """Return when every rank has called this. `seconds_waited` counts the time."""
    largest(0)


def largest(here: int) -> int:
    """Return the largest of the numbers of all ranks, on each. `seconds_waited` counts the time."""
    found = torch.tensor(here)
    with waiting():
        all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


@contextmanager
def waiting() -> Iterator[None]:
    """Count the time of the block in `seconds_waited`."""
    global _waited
    start = time.perf_counter()
    yield
    _waited += time.perf_counter() - start


def seconds_waited() -> float:
    """Return the seconds that this rank has waited for other ranks since the last call."""
    global _waited
    seconds = _waited
    _waited = 0.0
    return seconds


def together(compute: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `compute` on every rank of `group`, by default of all, and return all results, in rank order, on each rank.

    Without other ranks the only result is this process's own.

    Raises:
        Exception: a failed rank raises its own error, and every other rank that of the lowest failed rank, so that no
            rank waits for a failed one. An error that cannot be pickled arrives as a RuntimeError with its message.
    """
    if _is_alone(group):
        return [compute()]
    mine = _result(compute)
    if group is None:
        wait_for_all()
    return _gathered(mine, group)


def on_each_rank(compute: Callable[[], T]) -> T:
    """Call `compute` on every rank, and return this rank's own result. Raises as `together` does.

    No result travels: if no rank fails, it costs a flag.
    """
    if _is_alone():
        return compute()
    mine = _result(compute)
    if largest(int(isinstance(mine, _Failure))):
        _gathered(mine if isinstance(mine, _Failure) else None)
    assert not isinstance(mine, _Failure), "a failure of any rank was raised"
    return mine


def sum_of_ranks(compute: Callable[[], int]) -> int:
    """Call `compute` on every rank, and return the sum of the results on each. Raises as `together` does."""
    if _is_alone():
        return compute()
    mine = _result(compute)
    found = torch.tensor([1, 0] if isinstance(mine, _Failure) else [0, mine])
    with waiting():
        all_reduce(found)
    num_failures, total = found.tolist()
    if num_failures:
        _gathered(mine)
    return int(total)


def on_first_rank(compute: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Call `compute` on the first rank of `group`, by default of all, and return its result on every rank.

    Without other ranks it is only called. The result travels along a tree, and no rank has it twice. Raises as
    `together` does.
    """
    if _is_alone(group):
        return compute()
    first, *_ = dist.get_process_group_ranks(group or dist.group.WORLD)
    is_first = dist.get_rank() == first
    mine = _result(compute) if is_first else None
    if group is None:
        wait_for_all()
    told = [_portable(mine)]
    dist.broadcast_object_list(told, src=first, group=group or host_group())
    result: T | _Failure = mine if is_first else told[0]  # type: ignore[assignment]
    if isinstance(result, _Failure):
        raise result.error
    return result


def from_first_rank(numbers: Tensor, *, group: dist.ProcessGroup | None = None) -> None:
    """Replace numbers in host memory by those of the first rank of `group`, by default of all. Collective."""
    if not _is_alone(group):
        first, *_ = dist.get_process_group_ranks(group or dist.group.WORLD)
        dist.broadcast(numbers, first, group=group or host_group())


def to_first_rank(items: Sequence[T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Bring the objects of all ranks of `group`, by default of all, to its first rank, in rank order. Collective.

    The others get none. Each object travels once, without padding. Without other ranks they are returned.
    """
    if _is_alone(group):
        return [*items]
    content = torch.frombuffer(bytearray(pickle.dumps([*items])), dtype=torch.uint8) if items else _NOTHING
    group = group or host_group()
    first, *others = dist.get_process_group_ranks(group)
    is_first = dist.get_rank() == first
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(1 + len(others))] if is_first else None
    with waiting():
        dist.gather(torch.tensor([len(content)]), sizes, dst=first, group=group)
    if sizes is None:
        if len(content):
            begin_sending(content, first).wait()
        return []
    parts = [content, *(torch.empty(int(size), dtype=torch.uint8) for size in sizes[1:])]
    coming = [begin_receiving(part, rank) for rank, part in zip(others, parts[1:], strict=True) if len(part)]
    for transfer in coming:
        transfer.wait()
    found = [pickle.loads(part.numpy().tobytes()) for part in parts if len(part)]  # noqa: S301 - our own bytes
    return [item for of_rank in found for item in of_rank]


def in_shares(count: int, work: Callable[[range], T]) -> list[T]:
    """Call `work` on this rank's share of `range(count)`, and return the results of all ranks, in order, on each.

    Without ranks the only share is the full range. Raises as `together` does.
    """
    if not dist.is_initialized():
        return [work(range(count))]
    return together(lambda: work(share(count)))


def share(count: int) -> range:
    """Return this rank's share of `range(count)`, which is cut into equal runs."""
    return run_of(count, rank=dist.get_rank(), size=dist.get_world_size())


def run_of(count: int, *, rank: int, size: int) -> range:
    """Return the part of `range(count)` of one of `size` ranks: equal runs, as far as that is possible."""
    return range(rank * count // size, (rank + 1) * count // size)


@dataclass(frozen=True)
class _Failure:
    """The result of a rank that raised an error."""

    error: Exception


def _reduce(numbers: Tensor, rank: int, op: Any, *, sending: dist.Work | None = None) -> None:
    """Reduce `numbers` and those of another rank, in place, as soon as they are sent."""
    found = torch.empty_like(numbers)
    begin_receiving(found, rank, tag=REDUCED).wait()
    if sending:
        sending.wait()
    if op == dist.ReduceOp.SUM:
        numbers += found
    else:
        torch.maximum(numbers, found, out=numbers)


def _is_alone(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `group`, by default all ranks, has no rank but this one."""
    return not dist.is_initialized() or dist.get_world_size(group) == 1


def _result(compute: Callable[[], T]) -> T | _Failure:
    """Return the result of this rank."""
    try:
        return compute()
    except Exception as error:
        return _Failure(error)


def _gathered(mine: T | _Failure, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the results of all ranks of `group`, by default of all. Raises as `together` does."""
    sent = _portable(mine)
    results = [sent] * dist.get_world_size(group)
    dist.all_gather_object(results, sent, group=group or host_group())
    found = list[T]()
    for result in results:
        if isinstance(result, _Failure):
            raise mine.error if isinstance(mine, _Failure) else result.error
        found.append(result)
    return found


def _portable(result: T | _Failure) -> T | _Failure:
    """Return a result that can be pickled if it is an error; other results stay."""
    if not isinstance(result, _Failure):
        return result
    error = result.error
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # classes vary: some cannot be pickled, some cannot be unpickled
        words = type(error).__name__
        with suppress(Exception):  # the text of a user's exception may raise
            words = f"{words}: {error}"
        return _Failure(RuntimeError(words))
    return result
