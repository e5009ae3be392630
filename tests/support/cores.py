"""The cores that tests run on. Ranks that wait for shared memory spin, if each of them has a core to itself."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

CAN_CHOOSE = hasattr(os, "sched_setaffinity")  # Linux
ALL = range(os.cpu_count() or 1)


def take_share() -> None:
    """Confine a process of pytest-xdist, and all that it starts, to its share of the cores: at least one.

    Otherwise the ranks of two tests spin on the same cores, and keep each other from running.
    """
    number, count = (os.environ.get(f"PYTEST_XDIST_WORKER{name}", "") for name in ("", "_COUNT"))
    if not (CAN_CHOOSE and number):
        return
    cores = sorted(os.sched_getaffinity(0))
    first = int(number.removeprefix("gw")) % len(cores)
    os.sched_setaffinity(0, cores[first :: int(count)])


@contextmanager
def all_cores() -> Iterator[None]:
    """Use every core, also in programs started meanwhile: ranks then share memory, as on an idle machine."""
    if not CAN_CHOOSE:
        yield
        return
    share = os.sched_getaffinity(0)
    os.sched_setaffinity(0, ALL)
    try:
        yield
    finally:
        os.sched_setaffinity(0, share)
