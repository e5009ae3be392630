"""Wall-clock seconds per phase of a step; each phase is also noted for the watchdog and for people."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.platform import progress
from megarl.distributed import watchdog
from megarl.tracking.names import TIMING


class Timers:
    """The timers of one step: `with timers("gen"): ...`. The times of a phase that is entered twice are added."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str, *, instead_of: str | None = None) -> Iterator[None]:
        """Time the block. On CUDA it has to end with an operation that waits for the device.

        `instead_of` is the enclosing phase, which does not include these seconds.
        """
        start = time.perf_counter()
        before = watchdog.note(phase=phase)
        try:
            with progress.within(phase):
                yield
        finally:
            watchdog.note(phase=before)
            seconds = time.perf_counter() - start
            self._seconds[phase] += seconds
            if instead_of:
                self._seconds[instead_of] -= seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far, as metrics: `timing_s/gen`, ..."""
        return {f"{TIMING}{phase}": seconds for phase, seconds in self._seconds.items()}

    def elapsed(self) -> float:
        """Return the seconds since the step began, in phases or between them."""
        return time.perf_counter() - self._start
