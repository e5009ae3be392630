"""Real models and data for tests that have them: in `MEGARL_ASSETS`, by default `../shared/assets` of the checkout."""

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("MEGARL_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))


def asset(name: str) -> Path:
    """Return the path of an asset, e.g. `models/stories260K-hd32`; skip the test if it is absent."""
    path = ROOT / name
    if not path.exists():
        pytest.skip(f"{path} is absent")
    return path
