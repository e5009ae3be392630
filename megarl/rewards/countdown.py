"""Countdown: reach a target with the given numbers, each used once. The ground truth is `{target, numbers}`.

`countdown` scores like TinyZero's `countdown.compute_score`: the last line must have the expression in `<answer>` tags.
`countdown/bare` is for tiny models that write the expression alone.
"""

import operator
import re
from collections.abc import Mapping
from typing import Any

from megarl.rewards.arithmetic import Operations, read
from megarl.rewards.tags import answer_of, last_of_pairs

CORRECT = 1.0
WELL_FORMED = 0.1
"""Score of a wrong answer in its tags, or of a wrong bare expression."""

TOLERANCE = 1e-5
"""A value that misses the target by less is correct: division gives floats."""
MAX_BITS = 100_000
"""Most bits of a power; a larger power has no value."""

Number = int | float | complex


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Score the content of the last `<answer>...</answer>` in the last line; 0.0 if there is none."""
    answer = _tagged(solution_str)
    return 0.0 if answer is None else _score(answer, ground_truth)


def compute_score_bare(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Score the last `<answer>...</answer>`, or without tags the last line that is not empty, if it is arithmetic."""
    answer, tagged = answer_of(solution_str)
    return _score(answer, ground_truth) if tagged or _expression(answer) else 0.0


def answer_in(text: str) -> str:
    """Return the expression that is scored, without spaces; '' if it is not arithmetic."""
    return _expression(_tagged(text) or "")


def answer_in_bare(text: str) -> str:
    """Return the bare expression that is scored, without spaces; '' if it is not arithmetic."""
    return _expression(answer_of(text)[0])


def evaluate(text: str) -> tuple[Number, list[int]]:
    """Return the value of an arithmetic expression in Python, and the integers in its text: 3.5 has 3 and 5.

    Raises ValueError if Python gives no number, and beyond the bounds.
    """
    try:
        return read(text, _PYTHON), [int(digits) for digits in re.findall("[0-9]+", text)]
    except (ArithmeticError, TypeError) as error:  # complex numbers have no //
        raise ValueError(f"no value: {error}") from error


def _tagged(text: str) -> str | None:
    return last_of_pairs(text.rpartition("\n")[2])


def _expression(text: str) -> str:
    try:
        evaluate(text)
    except ValueError:
        return ""
    return "".join(text.split())


def _score(answer: str, truth: Any) -> float:
    target, given = float(truth["target"]), sorted(map(int, truth["numbers"]))
    try:
        value, numbers = evaluate(answer)
    except ValueError:
        return WELL_FORMED
    return CORRECT if sorted(numbers) == given and _is_near(value, target) else WELL_FORMED


def _is_near(value: Number, target: float) -> bool:
    try:
        return bool(abs(value - target) < TOLERANCE)
    except OverflowError:  # the difference is an integer beyond all floats
        return False


def _number(text: str) -> Number:
    if "e" in text or "E" in text:
        raise ValueError(f"{text} is written with an exponent")
    return float(text) if "." in text else int(text)


def _power(base: Any, exponent: Any) -> Number:
    are_integers = isinstance(base, int) and isinstance(exponent, int)
    if are_integers and abs(base) > 1 and base.bit_length() * exponent > MAX_BITS:
        raise ValueError("a power too large")
    power: Number = base**exponent
    return power


_PYTHON: Operations[Any] = Operations(
    number=_number,
    unary={"+": operator.pos, "-": operator.neg},
    binary={
        "+": operator.add,
        "-": operator.sub,
        "*": operator.mul,
        "/": operator.truediv,
        "//": operator.floordiv,
        "**": _power,
    },
)
