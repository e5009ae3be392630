"""On a GPU: the memory of a step is the most that was allocated in it."""

import pytest
import torch

from megarl.platform.memory import peak_memory

pytestmark = pytest.mark.gpu

NAME = "perf/max_memory_allocated_gb"


def test_the_peak_of_a_step_is_its_own() -> None:
    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_allocated()
    peak_memory()
    passing = torch.zeros(10**8, dtype=torch.uint8, device="cuda")
    del passing
    assert peak_memory()[NAME] == pytest.approx((before + 10**8) / 1e9, rel=0.01)
    assert peak_memory()[NAME] == pytest.approx(before / 1e9, abs=1e-4)
