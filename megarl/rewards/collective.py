"""Work of all ranks on the results of their processes: to wait for results, and to report failures."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

import torch.distributed as dist

from megarl.distributed import watchdog
from megarl.distributed.exchange import together
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


def gather(
    futures: Mapping[K, Future[ScoringResult]],
    num: int,
    read: Callable[[K, ScoringResult], V],
    *,
    wait_for: Callable[[Results], object] = lambda left: wait(left, timeout=ROUND_S),
    arrived: Callable[[int], object] = lambda number: None,
) -> dict[K, V]:
    """Return what `read` makes of the results of all ranks, by their keys. Collective.

    Ranks meet every second: a rank that has finished would see no progress of the others inside a long collective.

    Args:
        futures: of this rank.
        num: of all ranks.
        read: called once for each result, on the rank that has it.
        wait_for: waits for results, at most `ROUND_S`.
        arrived: receives the number of results, of all ranks, whenever there are some.
    """
    found = dict[K, V]()
    left = dict(futures)

    def collect() -> dict[K, V]:
        wait_for(list(left.values()))
        done = [key for key, future in left.items() if future.done()]
        return {key: read(key, left.pop(key).result()) for key in done}

    with watchdog.polling(lambda: not all(future.done() for future in futures.values())):
        while len(found) < num:
            new = {key: value for part in together(collect) for key, value in part.items()}
            if new:
                watchdog.note_progress()
                arrived(len(new))
            found |= new
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
        ignored = f"training ignores it ({section}.on_failure=mask)"
        fate = f"it gets {section}.default_score={default_score}" if on_failure == "score" else ignored
        for message in messages:
            logger.warning("%s; %s", message, fate)
        if num > len(messages):
            logger.warning("... and on %d more of %d", num - len(messages), of)
