"""Real models and data, used where they are present: `MEGARL_ASSETS`, by default `../shared/assets` of the checkout."""

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("MEGARL_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))


def asset(name: str) -> Path:
    """The path of an asset, e.g. `models/stories260K-hd32`; the test is skipped where it is absent."""
    path = ROOT / name
    if not path.exists():
        pytest.skip(f"{path} is absent")
    return path
