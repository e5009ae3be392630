"""The protocol of trackers, and a tracker that records nothing.

Only one rank records. The others have a `NullTracker`, so that no caller checks its rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from megarl.tracking.names import Ending

Row = Mapping[str, Any]
NextSteps = Callable[[Ending], Iterable[tuple[str, str]]]
"""Returns what the console shows at the end of a run: what the run has left and where, and commands."""


class Tracker(Protocol):
    """A receiver of metrics and tables, step by step."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step."""

    def log_table(self, name: str, rows: Sequence[Row], *, step: int) -> None:
        """Record rows of text and numbers, such as sample responses; all rows have the same keys."""

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Finish the run; `summary_rows` is a last table for people."""


class NullTracker:
    """A tracker that records nothing."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Do nothing."""

    def log_table(self, name: str, rows: Sequence[Row], *, step: int) -> None:
        """Do nothing."""

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Do nothing."""
