"""The result of the rules for a response, as it is read from the return value of a reward."""

import math
from collections.abc import Iterator, Mapping
from ctypes import c_float
from numbers import Real
from reprlib import Repr
from typing import Any, NamedTuple

from megarl.platform.safe_names import reported_number
from megarl.platform.secrets import READ_CHARACTERS, beginning

Numbers = dict[str, float]
"""`score`, perhaps `acc`, and further numbers that a reward reports of a response."""


class RuleResult(NamedTuple):
    """The result of the rules for a response."""

    numbers: Numbers
    pred: str | None  # the extracted answer, '' if the response has none; None: the rules extract none


MAX_NUMBERS = 16
"""Most numbers besides `score` and `acc` that are kept of a mapping."""
MAX_PRED = 512
"""Most characters of an answer that are kept."""
_SHOWN_CHARACTERS = 100
_GIANTS = Repr()
_GIANTS.maxstring = _GIANTS.maxother = READ_CHARACTERS


def as_rule_result(result: object) -> RuleResult:
    """Convert the return value of a reward; TypeError as for `as_numbers`. A long answer is cut at its end."""
    if isinstance(result, RuleResult):
        return result
    pred = result.get("pred") if isinstance(result, Mapping) else None
    answer = beginning(pred, MAX_PRED).encode(errors="replace").decode() if isinstance(pred, str) else None
    return RuleResult(as_numbers(result), answer)


def as_numbers(result: Any) -> Numbers:
    """Return the numbers in the return value of a reward; other values of a mapping are ignored.

    Raises TypeError if the score, or `acc` if given, is not a finite number in float32.
    """
    values = result if isinstance(result, Mapping) else {"score": result}
    if not is_number(values.get("score")):
        remedy = (
            "; .item() of an array or a tensor of one number gives it" if hasattr(values.get("score"), "item") else ""
        )
        raise TypeError(
            f"a reward returns a finite number or a dict with such a 'score', not {show(result)} (as float32){remedy}"
        )
    if not is_number(values.get("acc", 0.0)):
        raise TypeError(f"'acc' is a finite number as the score is, not {show(values['acc'])} (as float32)")
    numbers = {name: float(values[name]) for name in ("score", "acc") if name in values}
    most = len(numbers) + MAX_NUMBERS
    for name, number in _others(values):
        if len(numbers) == most:
            break
        numbers.setdefault(name, number)
    return numbers


def _others(values: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(key, str) and is_number(value):
            yield reported_number(key), float(value)


def show(value: object) -> str:
    """Format a value of a reward for a message: short, and without secrets."""
    try:
        return beginning(_GIANTS.repr(value), _SHOWN_CHARACTERS)
    except ValueError:  # Python does not write integers of thousands of digits
        return "an integer of too many digits"


def is_number(value: object) -> bool:
    """Return whether a value is a number that is finite in float32: scores are float32 on the rank."""
    try:
        return isinstance(value, Real) and math.isfinite(c_float(float(value)).value)
    except OverflowError:  # an integer beyond float64
        return False
