"""Wall-clock seconds per phase of a step; the watchdog hears of each."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.distributed import watchdog
from megarl.tracking.names import TIMING


class Timers:
    """Times the phases of one step: `with timers("gen"): ...`. A phase entered twice counts in full."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str, *, instead_of: str | None = None) -> Iterator[None]:
        """Time what happens inside. On CUDA the phase has to end with something that waits for the device.

        `instead_of` is the phase around it that these seconds do not count in.
        """
        start = time.perf_counter()
        before = watchdog.note(phase=phase)
        try:
            yield
        finally:
            watchdog.note(phase=before)
            seconds = time.perf_counter() - start
            self._seconds[phase] += seconds
            if instead_of:
                self._seconds[instead_of] -= seconds

    def seconds(self) -> dict[str, float]:
        """The seconds so far, as metrics: `timing_s/gen`, ..."""
        return {f"{TIMING}{phase}": seconds for phase, seconds in self._seconds.items()}
