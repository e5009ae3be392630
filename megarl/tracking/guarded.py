"""A tracker whose failures lose at most its own records and never stop the training."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.tracking.names import Ending
from megarl.tracking.protocol import Tracker

logger = logging.getLogger(__name__)


class Guarded:
    """A tracker that forwards to `tracker`, and warns of its first failure.

    Every later record is tried, because a full disk may have room again, or one record alone may be at fault.
    """

    def __init__(self, tracker: Tracker, name: str) -> None:
        self._tracker = tracker
        self._name = name
        self._has_failed = False

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step, unless the tracker fails."""
        self._try(lambda: self._tracker.log(metrics, step=step))

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Record a table, unless the tracker fails."""
        self._try(lambda: self._tracker.log_table(name, rows, step=step))

    def close(self, summary_rows: Sequence[Mapping[str, Any]] = (), *, ending: Ending = "finished") -> None:
        """Finish the run, unless the tracker fails."""
        self._try(lambda: self._tracker.close(summary_rows, ending=ending))

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # errors differ by library, and none may stop the training
            if not self._has_failed:
                logger.warning(
                    "%s accepts no records, training continues: %s: %s", self._name, type(error).__name__, error
                )
                logger.debug("%s failed", self._name, exc_info=error)
            self._has_failed = True
