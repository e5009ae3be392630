from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.workspace import Workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> "Workspace":
    from tests.support.workspace import make_workspace  # slow, also for the process that only distributes the tests

    return make_workspace(tmp_path_factory.mktemp("workspace"))
