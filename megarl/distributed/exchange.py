"""Ranks tell each other small host-side facts: what their engine generated, how they scored, what went wrong."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@cache
def host_group() -> Any:
    """The group of all ranks for data in host memory: gloo, also where tensors travel by NCCL."""
    return dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def together(compute: Callable[[], T]) -> list[T]:
    """Call `compute` on every rank and return the answers of all ranks, in rank order, on each.

    Raises:
        Exception: on every rank the error of the lowest rank that had one, so that no rank waits for a dead one.
    """
    try:
        mine: T | Exception = compute()
    except Exception as error:
        error.__traceback__ = None if dist.get_rank() else error.__traceback__
        mine = error
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine, group=host_group())
    for answer in answers:
        if isinstance(answer, Exception):
            raise mine if isinstance(mine, Exception) else answer
    return answers
