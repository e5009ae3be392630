"""On a GPU: the memory of a step is the most that was allocated in it."""

import pytest
import torch

from megarl.platform.memory import peak_memory
from tests.support.ranks import RankPool

pytestmark = pytest.mark.gpu

NAME = "perf/max_memory_allocated_gb"


def peaks() -> tuple[float, float, float]:
    """Return the memory before a step, the peak of a step with a large tensor, and that of the step after it, in GB."""
    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_allocated() / 1e9
    peak_memory()
    passing = torch.zeros(10**8, dtype=torch.uint8, device="cuda")
    del passing
    return before, peak_memory()[NAME], peak_memory()[NAME]


def test_the_peak_of_a_step_is_its_own() -> None:
    with RankPool("cuda") as pool:
        [(before, peak, after)] = pool.run(1, peaks)
    assert peak == pytest.approx(before + 0.1, rel=0.01)
    assert after == pytest.approx(before, abs=1e-4)
