"""Countdown: reach a target with the given numbers, each used once. The ground truth is `{target, numbers}`.

`countdown` scores like TinyZero's `countdown.compute_score`: the last line must have the expression in `<answer>` tags.
`countdown/bare` is for tiny models that write the expression alone.
"""

import operator
import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from megarl.platform.errors import UserError
from megarl.rewards.arithmetic import MAX_CHARACTERS, Operations, read
from megarl.rewards.countdown_solver import MAX_NUMBERS, solve
from megarl.rewards.notation import as_ascii, exact_integer, exact_number
from megarl.rewards.tags import answer_of, last_of_pairs

CORRECT = 1.0
WELL_FORMED = 0.1
"""Score of a wrong answer in its tags, or of a wrong bare expression."""

TOLERANCE = 1e-5
"""A value that misses the target by less is correct: division gives floats."""
MAX_BITS = 100_000
"""Most bits of a product and of a power; a larger one has no value, so no operation is slow."""

Number = int | float | complex
_DECIMALS = re.compile(r"\.[0-9]")
_SIGNS = re.compile(r"\\(times|cdot|div)(?![a-zA-Z])")
_AROUND = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))  # mathematics and bold type
_MOST_AROUND = 3


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None
) -> float:
    """Score the content of the last `<answer>...</answer>` in the last line; 0.0 if there is none.

    Raises UserError if the ground truth has no target and numbers.
    """
    target, given = _read(ground_truth)
    answer = _tagged(solution_str)
    return 0.0 if answer is None else _score(answer, target, given)


def compute_score_bare(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None
) -> float:
    """Score the last `<answer>...</answer>`, or without tags the last line that is not empty, if it is arithmetic.

    Raises UserError if the ground truth has no target and numbers.
    """
    target, given = _read(ground_truth)
    answer, tagged = answer_of(solution_str)
    return _score(answer, target, given) if tagged or _expression(answer) else 0.0


def right_answer(ground_truth: object) -> str | None:
    """Return a response that both rules score 1.0; None if there are too many numbers to find it quickly.

    Raises UserError if the ground truth has no target and numbers, or if no expression of + - * / has this value.
    """
    target, given = _read(ground_truth)
    if len(given) > MAX_NUMBERS:
        return None
    expression = solve(given, target)
    if expression is None:
        raise UserError(f"no expression of the numbers {given} is {target:g}")
    return f"<answer>{expression}</answer>"


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
        evaluate(_plain(text))
    except ValueError:
        return ""
    return "".join(_plain(text).split())


def _plain(text: str) -> str:
    """Return an expression with the signs of ASCII, without the marks of mathematics or bold type around it."""
    if len(text) > MAX_CHARACTERS:
        return text
    plain = _SIGNS.sub(lambda sign: "/" if sign[1] == "div" else "*", as_ascii(text)).strip()
    for _ in range(_MOST_AROUND):
        for opening, closing in _AROUND:
            if plain.startswith(opening) and plain.endswith(closing):
                plain = plain.removeprefix(opening).removesuffix(closing).strip()
    return plain


def _read(truth: Any) -> tuple[float, list[int]]:
    """Return the target and the sorted numbers of a ground truth. Raises UserError if it has something else."""
    try:
        target = float(exact_number(truth["target"]))
        given = truth["numbers"]
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"the ground truth {truth!r} is not {{target, numbers}}") from error
    if not isinstance(given, list | tuple):  # a text would be read as its digits
        raise UserError(f"the ground truth {truth!r} has numbers that are no list")
    if not isfinite(target):
        raise UserError(f"the ground truth {truth!r} has a target beyond all floats")
    numbers = [exact_integer(number) for number in given]
    if not numbers or min(numbers) < 0:
        raise UserError(f"the ground truth {truth!r} has no numbers, or a negative number")
    return target, sorted(numbers)


def _score(answer: str, target: float, given: list[int]) -> float:
    expression = _plain(answer)
    try:
        value, numbers = evaluate(expression)
    except ValueError:
        return WELL_FORMED
    is_glued = _DECIMALS.search(expression)  # 6.5 would be two of the numbers
    is_correct = not is_glued and sorted(numbers) == given and _is_near(value, target)
    return CORRECT if is_correct else WELL_FORMED


def _is_near(value: Number, target: float) -> bool:
    try:
        return bool(abs(value - target) < TOLERANCE)
    except OverflowError:  # the difference is an integer beyond all floats
        return False


def _number(text: str) -> Number:
    if "e" in text or "E" in text:
        raise ValueError(f"{text} is written with an exponent")
    return float(text) if "." in text else int(text)


def _product(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise ValueError("a product too large")
    return left * right


def _power(base: Number, exponent: Number) -> Number:
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and abs(base) > 1
        and base.bit_length() * exponent > MAX_BITS
    ):
        raise ValueError("a power too large")
    power: Number = base**exponent
    return power


_PYTHON: Operations[Any] = Operations(
    number=_number,
    unary={"+": operator.pos, "-": operator.neg},
    binary={
        "+": operator.add,
        "-": operator.sub,
        "*": _product,
        "/": operator.truediv,
        "//": operator.floordiv,
        "**": _power,
    },
)
