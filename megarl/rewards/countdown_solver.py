"""Finds an expression that solves a Countdown problem of a few numbers, by the values of all their subsets."""

import math
from collections.abc import Iterator, Sequence

MAX_NUMBERS = 4
"""Most numbers of a problem that is solved, in about a millisecond; each further number takes ten times as long."""
_DIGITS = 6
_TOLERANCE = 1e-6

_Values = dict[float, tuple[float, str]]
"""Rounded value -> the value, and an expression that has it."""


def solve(numbers: Sequence[int], target: float) -> str | None:
    """Return an expression of + - * / and all the numbers that has the value `target`; None if there is none."""
    found: dict[int, _Values] = {
        1 << place: {float(number): (float(number), str(number))} for place, number in enumerate(numbers)
    }
    complete = (1 << len(numbers)) - 1
    for subset in range(1, complete):
        if subset not in found:
            found[subset] = {}
            for part, rest in _splits(subset):
                for value, text in _joined(found[part], found[rest]):
                    found[subset].setdefault(round(value, _DIGITS), (value, text))
    if complete in found:
        return next((text for value, text in found[complete].values() if abs(value - target) < _TOLERANCE), None)
    for part, rest in _splits(complete):
        for text in _reaching(target, found[part], found[rest]):
            return text
    return None


def _splits(subset: int) -> Iterator[tuple[int, int]]:
    """Yield each division of a subset, given by its bits, into two parts; the first has no higher bit."""
    part = (subset - 1) & subset
    while part:
        if part < subset ^ part:
            yield part, subset ^ part
        part = (part - 1) & subset


def _joined(left: _Values, right: _Values) -> Iterator[tuple[float, str]]:
    for a, first in left.values():
        for b, second in right.values():
            yield a + b, f"({first}+{second})"
            yield a - b, f"({first}-{second})"
            yield b - a, f"({second}-{first})"
            yield a * b, f"({first}*{second})"
            if b:
                yield a / b, f"({first}/{second})"
            if a:
                yield b / a, f"({second}/{first})"


def _reaching(target: float, left: _Values, right: _Values) -> Iterator[str]:
    """Yield expressions of a value of each side that have the value `target`."""
    for a, first in left.values():
        partners = [(target - a, f"{first}+{{}}"), (a - target, f"{first}-{{}}"), (a + target, f"{{}}-{first}")]
        if a:
            partners += [(target / a, f"{first}*{{}}"), (target * a, f"{{}}/{first}")]
        elif not target:
            partners += [(b, f"{first}*{{}}") for b in right]
        if target:
            partners.append((a / target, f"{first}/{{}}"))
        for partner, form in partners:
            value, second = right.get(round(partner, _DIGITS), (math.inf, ""))
            divides_by_zero = form.endswith("/{}") and not value
            if abs(value - partner) < _TOLERANCE and not divides_by_zero:
                yield form.format(second)
