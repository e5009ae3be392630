"""The peak memory of a piece of work, above the memory that the process held before.

On CPU it is the kernel's own high-water mark of the process's resident memory, reset before the work: it sees every
allocation of every library and thread (torch, gloo's copies, packed weights) and misses none between two samples. The
process has to be started with `ENVIRONMENT`, so that freed memory is returned at once. By default the C library keeps
freed memory, and some of the work's memory would not count. On CUDA it is the peak of torch's allocator.
"""

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5), clear_refs
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": "0"}  # mallopt(3), bytes


def peak_extra_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Do the work once more; return its peak in bytes above the start, None if nothing counts them."""
    work()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not RESET.exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)
    RESET.write_text(RESET_PEAK, encoding="utf-8")
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s*(\d+) kB", STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{STATUS} has no {key}"
    return int(found[1]) * 1024
