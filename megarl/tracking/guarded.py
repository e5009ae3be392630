"""A tracker whose failures lose at most its own records and never stop the training."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.tracking.names import Ending

if TYPE_CHECKING:
    from megarl.tracking.tracker import Tracker

logger = logging.getLogger(__name__)


class Guarded:
    """A tracker that forwards to `tracker`, and warns once when it begins to fail and once when it works again."""

    def __init__(self, tracker: "Tracker", name: str) -> None:
        self._tracker = tracker
        self._name = name
        self._failing = False

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
            if not self._failing:
                logger.warning(
                    "%s accepts no records, training continues: %s: %s", self._name, type(error).__name__, error
                )
            self._failing = True
        else:
            if self._failing:
                logger.warning("%s accepts records again", self._name)
            self._failing = False
