"""Memory of the host that the C library keeps for the next request, and does not return to the kernel.

Each step asks for the same large tensors. By default glibc maps each of them anew, and the kernel clears page after
page when it is first touched. That takes longer than to compute with them.
"""

import ctypes
import os

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it when it makes its first tensor on the CPU (D250)
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # malloc.h
MOST_KEPT = 2**31 - 1  # bytes at the end of the heap, the most that mallopt(3) takes


def prefer_huge_pages() -> None:
    """Let large tensors begin at a page and ask the kernel for huge pages, unless the user has decided otherwise.

    Must come before torch is imported. Without it, glibc cuts up to 64 bytes off the block of each freed tensor, so the
    next tensor of the same size does not fit there, and the memory of a process grows by several copies of a tensor.
    """
    os.environ.setdefault(HUGE_PAGES, "1")


def keep_freed_memory() -> None:
    """Let this process reuse the memory that it frees. Nothing changes with a C library other than glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(MMAP_MAX, 0)  # D247
        mallopt(TRIM_THRESHOLD, MOST_KEPT)
