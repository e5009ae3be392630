"""Work of all ranks on the results of their processes: to wait for results, and to report failures."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from megarl.distributed import watchdog
from megarl.distributed.exchange import sum_of_ranks, together
from megarl.platform.errors import UserError
from megarl.sandbox.pool import ScoringResult

ROUND_S = 1.0
NUM_WARNINGS = 3
K = TypeVar("K")
V = TypeVar("V")
Results = Sequence[Future[ScoringResult]]
logger = logging.getLogger(__name__)


class RewardError(UserError):
    """A reward fails on too many responses, or no reward can read a row."""


@dataclass(frozen=True)
class Mean:
    """The mean of numbers that some samples have."""

    total: float
    count: int  # of these samples, at least 1

    @property
    def value(self) -> float:
        """The mean."""
        return self.total / self.count


ScoringMetrics = Mapping[str, float | Mean]
"""Metrics of a scoring; a float is a mean over all its samples, or an extreme."""


def gather(
    futures: Mapping[K, Future[ScoringResult]],
    num: int,
    read: Callable[[K, ScoringResult], V],
    *,
    group: dist.ProcessGroup | None = None,
    wait_for: Callable[[Results], object] = lambda left: wait(left, timeout=ROUND_S),
    arrived: Callable[[int], object] = lambda number: None,
) -> dict[K, V]:
    """Return what `read` makes of the results of the ranks of `group`, by default of all, by their keys. Collective.

    All ranks meet every second: a rank that has finished would see no progress of the others inside a long collective.

    Args:
        futures: of this rank.
        num: of all ranks.
        read: called once for each result, on the rank that has it.
        group: the ranks that get the results; None: all.
        wait_for: waits for results, at most `ROUND_S`.
        arrived: receives the number of results, of all ranks, whenever there are some.
    """
    found = dict[K, V]()
    left = dict(futures)

    def collect(new: dict[K, V]) -> int:
        wait_for(list(left.values()))
        done = [key for key, future in left.items() if future.done()]
        new |= {key: read(key, left.pop(key).result()) for key in done}
        return len(new)

    with watchdog.polling(lambda: not all(future.done() for future in futures.values())):
        while num:
            new = dict[K, V]()
            num_new = sum_of_ranks(partial(collect, new))
            if num_new:
                watchdog.note_progress()
                arrived(num_new)
                for part in together(new.copy, group=group):
                    found |= part
            num -= num_new
    return found


def report_failures(
    messages: Sequence[str], num: int, *, of: int, section: str, on_failure: str, default_score: float
) -> None:
    """Warn of `num` failures on the first rank. `messages` describe the first of them.

    Raises:
        RewardError: `on_failure` is stop, on all ranks alike.
    """
    if num and on_failure == "stop":
        raise RewardError(f"{'; '.join(messages)} ({section}.on_failure=stop)")
    if dist.get_rank() == 0:
        fate = f"training ignores it ({section}.on_failure=mask)"
        if on_failure == "score":
            fate = f"it gets {section}.default_score={default_score}"
        for message in messages:
            logger.warning("%s; %s", message, fate)
        if num > len(messages):
            logger.warning("... and on %d more of %d", num - len(messages), of)
