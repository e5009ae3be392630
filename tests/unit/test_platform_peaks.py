"""The speed of a device is measured in seconds, however slow the device is."""

import pytest
import torch

from megarl.platform import peaks


def test_peak_measurement_stops_at_first_slow_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without instructions for bfloat16 would compute for minutes."""
    monkeypatch.setattr(peaks, "ROWS", {"cpu": (64, 1 << 20)})  # the second has 4 TiB
    monkeypatch.setattr(peaks, "LONG_S", 0.0)
    assert peaks.measure(torch.device("cpu"), torch.float32).flops_per_second > 0


@pytest.mark.parametrize(("width", "flops"), [(64, 10.0), (128, 10.0), (181.02, 15.0), (256, 20.0), (512, 50.0)])
def test_narrow_model_has_speed_of_its_width(width: int, flops: float) -> None:
    """Half-way between two widths, in their logarithms, is half-way between their speeds."""
    measured = peaks.Peaks(flops_per_second=50.0, bytes_per_second=1.0, narrow_flops={256: 20.0, 128: 10.0})
    assert measured.flops_at(width) == pytest.approx(flops, rel=1e-3)


def test_every_model_has_peak_speed_without_measured_widths() -> None:
    assert peaks.Peaks(flops_per_second=50.0, bytes_per_second=1.0).flops_at(64) == 50.0
