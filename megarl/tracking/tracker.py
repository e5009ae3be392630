"""The trackers of a run as one: each record goes to all of them."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from megarl.distributed.signals import Stopped
from megarl.tracking.console import Console
from megarl.tracking.jsonl import Jsonl
from megarl.tracking.names import Ending
from megarl.tracking.offered import CONSOLE, FILES, load_tracker
from megarl.tracking.protocol import NextSteps, NullTracker, Row, Tracker
from megarl.tracking.run import TrackedRun

logger = logging.getLogger(__name__)


class Trackers:
    """A tracker that forwards to `trackers` (name for messages -> tracker). Each may fail alone.

    A failure costs at most the records of its tracker, and one warning. It reaches neither the other trackers nor the
    run. Every later record is tried, because a full disk may have room again, or one record alone may be at fault.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._failed = set[str]()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step in all trackers."""
        self._each(lambda tracker: tracker.log(metrics, step=step))

    def log_table(self, name: str, rows: Sequence[Row], *, step: int) -> None:
        """Record a table in all trackers."""
        self._each(lambda tracker: tracker.log_table(name, rows, step=step))

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Finish the run in all trackers."""
        self._each(lambda tracker: tracker.close(summary_rows, ending=ending))

    def _each(self, record: Callable[[Tracker], None]) -> None:
        """Record in each tracker; warn of the first error of a tracker, and raise none."""
        for name, tracker in self._trackers.items():
            try:
                record(tracker)
            except Exception as error:  # errors differ by library, and none may stop the training
                if name not in self._failed:
                    kind = type(error).__name__
                    logger.warning("%s accepts no records, training continues: %s: %s", name, kind, error)
                    logger.debug("%s failed", name, exc_info=error)
                self._failed.add(name)


@contextmanager
def recording(tracker: Tracker) -> Iterator[None]:
    """Close `tracker` when the block ends, with how it ended."""
    ending: Ending = "failed"
    try:
        yield
        ending = "finished"
    except Stopped:
        ending = "stopped"
        raise
    finally:
        tracker.close(ending=ending)


def make_tracker(
    names: Sequence[str],
    run: TrackedRun,
    *,
    total_steps: int,
    is_main: bool,
    also: Mapping[str, Tracker] = MappingProxyType({}),
    next_steps: NextSteps = lambda ending: (),
) -> Tracker:
    """Return the trackers called `names`, or a tracker that records nothing unless `is_main`.

    Args:
        names: those of `trainer.logger`. The files of `jsonl` are always written.
        run: the run to record. A resumed run continues its records, and drops those of later steps.
        total_steps: steps of the run, for the console.
        is_main: whether this rank records.
        also: further trackers by their names. They follow the files, which they may read, and precede the others.
        next_steps: returns what the console shows at the end: what the run has left and where, commands.

    Raises:
        UserError: a tracker cannot be imported, or cannot record.
    """
    if not is_main:
        return NullTracker()
    run.run_dir.mkdir(parents=True, exist_ok=True)
    records = Jsonl(run.run_dir, resume_step=run.resume_step, resume_metrics=run.resume_metrics)
    trackers: dict[str, Tracker] = {FILES: records, **also}
    trackers |= {name: load_tracker(name)(run, records) for name in names if name not in (FILES, CONSOLE)}
    if CONSOLE in names:  # last: at the end it names what the others have written
        trackers[CONSOLE] = Console(total_steps=total_steps, next_steps=next_steps)
    return Trackers(trackers)
