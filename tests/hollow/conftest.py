"""The tests of the hollow device run on it alone: `make test-cuda`."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of the hollow device on a machine without one."""
    if "HOLLOW_MAIL" in os.environ:
        return
    for item in items:
        if item.get_closest_marker("hollow"):
            item.add_marker(pytest.mark.skip(reason="needs the hollow device: `make test-cuda`"))
