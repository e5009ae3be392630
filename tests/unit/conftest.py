"""Settings of property tests (no deadline, and the same examples in every run), and fixtures of several modules."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.ranks import world_of_one

settings.register_profile("megarl", deadline=None, derandomize=True)
settings.load_profile("megarl")


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """Hold a process group of one rank."""
    with world_of_one():
        yield


@pytest.fixture
def news_captured(caplog: pytest.LogCaptureFixture) -> None:
    """Let `caplog` hold what megarl logs at the level of a run."""
    caplog.set_level("INFO", "megarl")
