"""Memory of the host that the C library keeps for the next request, and does not return to the kernel.

Each step asks for the same large tensors. By default glibc maps each of them anew, and the kernel clears page after
page when it is first touched. That takes longer than to compute with them.
"""

import ctypes

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # malloc.h
MOST_KEPT = 2**31 - 1  # bytes at the end of the heap, the most that mallopt(3) takes


def keep_freed_memory() -> None:
    """Let this process reuse the memory that it frees. Nothing changes with a C library other than glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, MOST_KEPT)
