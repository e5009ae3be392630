"""Memory that a process frees is ready for its next request."""

import os
import platform
import resource
import subprocess
import sys

import pytest

from megarl.platform.heap import HUGE_PAGES

PROGRAM = """
import resource, sys
from megarl.platform.heap import keep_freed_memory, prefer_huge_pages

if sys.argv[1] == "kept":
    prefer_huge_pages()
import torch
if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(2):
    torch.ones(50_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(50_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 10 * 200_000_000 // resource.getpagesize()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_tensor_pages_are_reused() -> None:
    environment = {name: value for name, value in os.environ.items() if name != HUGE_PAGES}  # as a user starts it

    def faults(how: str) -> int:
        command = [sys.executable, "-c", PROGRAM, how]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    assert faults("kept") < PAGES / 100 < faults("returned")
