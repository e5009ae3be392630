"""Fixtures that tests of ranks share: the processes, and the checkpoints that a module names."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> "Iterator[RankPool]":
    """Processes for worlds of any size."""
    from tests.support.ranks import RankPool  # slow, also for the process that only distributes the tests

    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="module")
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random weights for every entry of the module's CHECKPOINTS: name -> (variant, replaced fields of its config)."""
    from tests.support.tiny import write_checkpoint  # slow to import, and not all modules have checkpoints

    root = tmp_path_factory.mktemp("checkpoints")
    named = request.module.CHECKPOINTS.items()
    return {name: write_checkpoint(root / name, variant, **changes) for name, (variant, changes) in named}
