"""The counters of the hollow device in this process: what the host asked of it, by name (docs/hollow.md)."""

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.hollow_report.argtypes, driver.hollow_report.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_size_t
    return driver


def counters() -> Counter[str]:
    """Return all counters since the process began; what never happened is 0."""
    driver = _driver()
    text = ctypes.create_string_buffer(driver.hollow_report(None, 0) + 1)
    driver.hollow_report(text, len(text))
    found = Counter[str]()
    for line in text.value.decode().splitlines():
        name, count = line.rsplit(maxsplit=1)
        found[name] += int(count)  # several places of the device share a name
    return found


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count within the block: the counter is filled at its end."""
    before, found = counters(), Counter[str]()
    yield found
    found.update(counters() - before)


class Laps:
    """Counts from lap to lap."""

    def __init__(self) -> None:
        self.found = dict[str, Counter[str]]()
        """The counts of each lap, by its name."""
        self._last = counters()

    def end(self, name: str) -> None:
        """End a lap."""
        now = counters()
        self.found[name], self._last = now - self._last, now
