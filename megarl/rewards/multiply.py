"""Multiply: the product of two integers. The ground truth is the product.

The scores are those of TinyZero's `multiply.compute_score`, which reads fewer answers: only digits with a sign, in
tags.
"""

import re
from collections.abc import Mapping
from typing import Any

from megarl.rewards.countdown import evaluate
from megarl.rewards.notation import as_ascii, exact_integer, join_thousands, without_markup
from megarl.rewards.tags import answer_of

CORRECT = 1.0
WELL_FORMED = 0.1
"""Score of an integer in answer tags that is not the product."""

# the bound keeps a hostile answer cheap; decimals may be zeros
_INTEGER = re.compile(r"[-+]? ?[0-9]{1,40}(?:\.0{0,40})?")
_PRODUCT = re.compile(r"[-+*/(). 0-9]*[0-9][-+*/(). 0-9]*")
_AROUND = " \t\r\n$*"  # money, mathematics and bold type


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Score the last `<answer>...</answer>` of a response; without tags, its last line. Both may be an equation.

    Raises UserError if the ground truth is no integer.
    """
    product = exact_integer(ground_truth)
    number, tagged, is_consistent = _integer(solution_str)
    if number is None:
        return 0.0
    if number == product and is_consistent:
        return CORRECT
    return WELL_FORMED if tagged else 0.0


def right_answer(ground_truth: Any) -> str:
    """Return a response that scores 1.0. Raises UserError if the ground truth is no integer."""
    return f"<answer>{exact_integer(ground_truth)}</answer>"


def answer_in(text: str) -> str:
    """Return the integer that is scored; '' if there is none."""
    number, _, _ = _integer(text)
    return "" if number is None else str(number)


def _integer(text: str) -> tuple[int | None, bool, bool]:
    """Return the integer, whether it is in answer tags, and whether all sides of an equation can have this value."""
    words, tagged = answer_of(text)
    plain = without_markup(join_thousands(as_ascii(words.replace("\\times", "*").replace("\\cdot", "*"))))
    *sides, last = plain.split("=")
    digits = last.rstrip(_AROUND + ".").lstrip(_AROUND)
    if not _INTEGER.fullmatch(digits):
        return None, tagged, False
    number = int(digits.partition(".")[0].replace(" ", ""))
    return number, tagged, all(_may_be(side, number) for side in sides)


def _may_be(side: str, number: int) -> bool:
    """Return whether one side of an equation is words, or arithmetic with this value."""
    arithmetic = side.strip(_AROUND)
    if not _PRODUCT.fullmatch(arithmetic):
        return True
    try:
        value, _ = evaluate(arithmetic)
    except ValueError:
        return False
    return value == number
