"""The phase that this process is in, and how far it is there, for people who watch.

A process counts only its own work, so no rank waits for another and no message is sent. Another thread may read.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a step, at one moment."""

    name: str
    since: float  # time.monotonic()
    done: int = 0
    total: int = 0  # 0: nothing is counted; grows if the phase announces more work
    unit: str = ""
    usual: "Phase | None" = None  # this phase when it last ended
    seconds: float = 0.0  # its duration, once it has ended

    @property
    def expected(self) -> int:
        """The number of units that this phase will count, as far as known."""
        return max(self.total, self.usual.total if self.usual else 0)

    def left(self, now: float) -> float | None:
        """Return the seconds left, from the last duration or else from the share that is done; None if unknown."""
        elapsed = now - self.since
        if self.usual and elapsed <= self.usual.seconds:
            return self.usual.seconds - elapsed
        return elapsed * (self.expected - self.done) / self.done if self.done else None


_now: Phase | None = None
_ended: dict[str, Phase] = {}  # by name


@contextmanager
def within(name: str) -> Iterator[None]:
    """Within the block this process is in the phase `name`; afterwards it is in the enclosing phase again."""
    global _now
    outer = _now
    start = time.monotonic()
    usual = _ended.get(name)
    _now = Phase(name=name, since=start, unit=usual.unit if usual else "", usual=usual)
    try:
        yield
    finally:
        _ended[name] = replace(_now, usual=None, seconds=time.monotonic() - start)
        _now = outer


def announce(count: int, unit: str) -> None:
    """Add `count` units of work to the current phase; a negative `count` takes announced units back."""
    global _now
    if _now:
        _now = replace(_now, total=_now.total + count, unit=unit)


def advance(count: int = 1) -> None:
    """Count `count` units of the announced work as done."""
    global _now
    if _now:
        _now = replace(_now, done=min(_now.done + count, _now.total))


def now() -> Phase | None:
    """Return the current phase; None outside of all phases."""
    return _now
