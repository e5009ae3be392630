"""Work of all ranks on the results of their processes: to wait for results, and to report failures."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from megarl.platform import progress
from megarl.distributed import watchdog
from megarl.distributed.exchange import sum_of_ranks
from megarl.platform.errors import UserError
from megarl.sandbox.pool import Pool, ScoringResult

ROUND_S = 1.0
NUM_WARNINGS = 3
K = TypeVar("K")
V = TypeVar("V")
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


def finish(
    futures: Mapping[K, Future[ScoringResult]],
    num: int,
    read: Callable[[K, ScoringResult], V],
    *,
    pool: Pool | None = None,
) -> dict[K, V]:
    """Wait for the results of all ranks. Return what `read` makes of those of this rank, by their keys. Collective.

    All ranks meet every second: a rank that has finished would see no progress of the others inside a long collective.

    Args:
        futures: of this rank.
        num: of all ranks.
        read: called once for each result of this rank. If it raises, all ranks do.
        pool: which computes them, and may start processes meanwhile; people see how many results have come.
    """
    found = dict[K, V]()
    left = dict(futures)
    if pool:
        progress.announce(num, "rewards")

    def collect() -> int:
        if pool:
            pool.count_pending([*left.values()], within_s=ROUND_S)
        else:
            wait(left.values(), timeout=ROUND_S)
        done = [key for key, future in left.items() if future.done()]
        found.update({key: read(key, left.pop(key).result()) for key in done})
        return len(done)

    with watchdog.polling(lambda: not all(future.done() for future in futures.values())):
        while num:
            num_new = sum_of_ranks(collect)
            if num_new:
                watchdog.note_progress()
                if pool:
                    progress.advance(num_new)
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
