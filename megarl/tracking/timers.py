"""Wall-clock seconds per phase of a step."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.tracking.names import TIMING


class Timers:
    """Times the phases of one step: `with timers("gen"): ...`. A phase entered twice counts in full."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time what happens inside. On CUDA the phase has to end with something that waits for the device."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """The seconds so far, as metrics: `timing_s/gen`, ..."""
        return {f"{TIMING}{phase}": seconds for phase, seconds in self._seconds.items()}
