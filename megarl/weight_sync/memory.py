"""Measures the peak memory of a piece of work, as torch's allocators count it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MEASURED = "megarl.measured"


class MemoryMeter:
    """Within `recording`, each `measured` block sets `peak_bytes`: its peak, less the memory held before the block.

    Memory that torch does not allocate, such as gloo's, is not counted. On CPU torch's profiler counts, which slows the
    work down. The profiler sees memory freed only if it saw the allocation, so work that replaces memory must run once
    before, in the same recording.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record allocations. On CPU, `peak_bytes` is set after the block, for the last `measured` block."""
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
        """Measure the memory of the work in the block."""
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
    """Hide C++ warnings of torch's allocator about memory that was allocated before the profiler began."""
    kept = os.dup(2)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
