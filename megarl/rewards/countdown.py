"""Countdown: reach a target with the given numbers, each used once. The ground truth is `{target, numbers}`.

`countdown` gives what TinyZero's `countdown.compute_score` gives: the last line has to hold the expression in
`<answer>` tags. `countdown/bare` is for tiny models that write the expression alone.
"""

import operator
import re
from collections.abc import Mapping
from typing import Any

from megarl.rewards.arithmetic import Operations, read
from megarl.rewards.tags import answer_of, last_of_pairs

CORRECT = 1.0
WELL_FORMED = 0.1
"""For an answer in its tags, or a bare expression, which does not solve the problem."""

TOLERANCE = 1e-5
"""By how much less than this a value, which is a float where it was divided, may miss the target."""
MAX_BITS = 100_000
"""Of a power: a larger one counts as no value."""

Number = int | float | complex


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Score what stands in the last `<answer>...</answer>` of the last line; 0.0 where there is none."""
    answer = _tagged(solution_str)
    return 0.0 if answer is None else _score(answer, ground_truth)


def compute_score_bare(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Score the last `<answer>...</answer>`, or without tags the last line that is not empty, if it is arithmetic."""
    answer, tagged = answer_of(solution_str)
    return _score(answer, ground_truth) if tagged or _expression(answer) else 0.0


def answer_in(text: str) -> str:
    """The expression that is scored, without spaces; '' where it is none."""
    return _expression(_tagged(text) or "")


def answer_in_bare(text: str) -> str:
    """The bare expression that is scored, without spaces; '' where it is none."""
    return _expression(answer_of(text)[0])


def evaluate(text: str) -> tuple[Number, list[int]]:
    """The value of an arithmetic expression in Python, and the whole numbers in it: 3.5 has 3 and 5.

    Raises ValueError where Python gives no number, and past the bounds.
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
    except OverflowError:  # of an integer beyond all floats
        return False


def _number(text: str) -> Number:
    if "e" in text or "E" in text:
        raise ValueError(f"{text} is written with an exponent")
    return float(text) if "." in text else int(text)


def _power(base: Any, exponent: Any) -> Number:
    are_whole = isinstance(base, int) and isinstance(exponent, int)
    if are_whole and abs(base) > 1 and base.bit_length() * exponent > MAX_BITS:
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
