"""How much memory a piece of work takes at its worst moment, as torch's own allocators count it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MEASURED = "megarl.measured"


class MemoryMeter:
    """Within `recording`, each `measured` block sets `peak_bytes`: the most it held beyond what was held before.

    Memory that torch does not allocate is not seen: a library's own, gloo's for example. On CPU torch's profiler keeps
    the books, which slows the work down. It sees a piece of memory freed only where it saw it allocated, so work that
    replaces memory has to be done once before, in the same recording.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The books are kept; on CPU `peak_bytes` is there afterwards, that of the last `measured` block."""
        if self._device.type == "cuda":
            yield
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with _without_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        assert profiler.profiler and profiler.profiler.kineto_results
        events = profiler.profiler.kineto_results.events()
        block = max((event for event in events if event.name() == MEASURED), key=lambda event: int(event.start_ns()))
        changes = sorted(
            (event.start_ns(), event.nbytes())
            for event in events
            if event.name() == "[memory]" and block.start_ns() <= event.start_ns() <= block.end_ns()
        )
        now = self.peak_bytes = 0
        for _, num_bytes in changes:
            now += num_bytes
            self.peak_bytes = max(self.peak_bytes, now)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """The work whose memory counts."""
        if self._device.type != "cuda":
            with record_function(MEASURED):
                yield
            return
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield
        torch.cuda.synchronize(self._device)
        self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - before


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Torch's allocator warns, from C++, of memory that was allocated before the profiler began."""
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
