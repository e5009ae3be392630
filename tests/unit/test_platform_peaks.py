"""The speed of a device is measured in seconds, however slow the device is."""

import pytest
import torch

from megarl.platform import peaks


def test_no_product_is_larger_than_one_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without instructions for bfloat16 would compute for minutes."""
    monkeypatch.setattr(peaks, "ROWS", {"cpu": (64, 1 << 20)})  # the second has 4 TiB
    monkeypatch.setattr(peaks, "LONG_S", 0.0)
    assert peaks.measure(torch.device("cpu"), torch.float32).flops_per_second > 0
