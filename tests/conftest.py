"""Settings of all tests: no model hub, one thread per process because ranks run in parallel, GPU tests on a GPU.

The process of the tests works on the CPU; tests that need a GPU have ranks of their own.
"""

import gc
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from importlib import import_module

import pytest

from tests.support.cores import take_share

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MEGARL_CACHE", tempfile.mkdtemp(prefix="megarl-cache-"))  # not the one of the user
# A process of pytest-xdist ignores SIGINT, and so would every program that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
take_share()
COLLECTIONS_BEFORE_ALL = 100


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Take back what a command that a test calls in this process changes of the log."""
    root, megarl = logging.getLogger(), logging.getLogger("megarl")
    handlers, level = [*root.handlers], megarl.level
    yield
    for handler in [one for one in root.handlers if one not in handlers]:
        root.removeHandler(handler)
        handler.close()
    megarl.setLevel(level)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Decide the device before the first test module asks. The process that only distributes tests imports no torch."""
    gc.disable()
    if isinstance(collector, pytest.Session):
        import_module("megarl.platform.device").decide_device("cpu")


def pytest_collection_finish() -> None:
    """Search all memory for garbage less often: it has a million objects of imports."""
    gc.enable()
    gc.freeze()
    newest, middle, _ = gc.get_threshold()
    gc.set_threshold(newest, middle, COLLECTIONS_BEFORE_ALL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if needy and not import_module("torch").cuda.is_available():
        for item in needy:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
