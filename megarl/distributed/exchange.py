"""Ranks tell each other small host-side facts: what their engine generated, how they scored, what went wrong."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def host_group() -> Any:
    """The group of all ranks for data in host memory: gloo, also where tensors travel by NCCL."""
    return dist.group.WORLD if dist.get_backend() == "gloo" else _gloo_group()


@cache
def _gloo_group() -> Any:
    return dist.new_group(backend="gloo")


def together(compute: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `compute` on every rank of `group`, by default all, and return their answers, in rank order, on each.

    Raises:
        Exception: on a rank that had an error, that one, and on all others that of the lowest rank which had one, so
            that no rank waits for a dead one. One that cannot travel arrives as a RuntimeError with its words.
    """
    failure: Exception | None = None
    try:
        mine: T | _Failure = compute()
    except Exception as error:
        failure, mine = error, _Failure(_portable(error))
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, mine, group=group or host_group())
    for answer in answers:
        if isinstance(answer, _Failure):
            raise failure or answer.error
    return answers


def on_first_rank(compute: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """The answer of the first rank of `group`, by default of all, to `compute`, which no other calls, on each of them.

    Raises as `together` does.
    """
    answers: list[Any] = together(lambda: compute() if dist.get_rank(group) == 0 else None, group=group)
    answer: T = answers[0]
    return answer


def in_shares(count: int, work: Callable[[range], T]) -> list[T]:
    """Cut `range(count)` into equal runs, one for each rank; the answers of `work` in that order, on every rank.

    Without ranks one run is all. Raises as `together` does.
    """
    if not dist.is_initialized():
        return [work(range(count))]
    return together(lambda: work(share(count)))


def share(count: int) -> range:
    """This rank's run of `range(count)`, cut into equal ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return range(rank * count // size, (rank + 1) * count // size)


@dataclass(frozen=True)
class _Failure:
    """What a rank answers that has no answer."""

    error: Exception


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # whatever classes there are: some do not pickle, some do not come back
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
