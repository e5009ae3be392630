"""Multiply: the product of two integers. The ground truth is the product.

The scores are those of TinyZero's `multiply.compute_score`, which reads fewer answers: only digits with a sign, in
tags. An answer is an integer, or an equation whose last side is an integer and whose other sides are arithmetic or a
name. Anything else is no answer: `57! = 56`, `57 <= 56`.
"""

import re
from collections.abc import Mapping

from megarl.rewards.countdown import Number, evaluate
from megarl.rewards.markup import GAP, without_markup
from megarl.rewards.notation import MAX_DIGITS, as_ascii, exact_integer, join_thousands
from megarl.rewards.tags import answer_of
from megarl.rewards.units import is_name

CORRECT = 1.0
WELL_FORMED = 0.1
"""Score of an integer in answer tags that is not the product."""

_MAX_CHARACTERS = 1000
"""Most characters of an answer."""
_INTEGER = re.compile(rf"[-+]? ?\$?([0-9]{{1,{MAX_DIGITS}}})(?:\.0{{1,40}})?[.,]?")  # decimals may be zeros
_TIMES = re.compile(r"\\(?:times|cdot)(?![a-zA-Z])|(?<=[0-9)])(?: ?[xX] ?| times )(?=[0-9(])")


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None
) -> float:
    """Score the last `<answer>...</answer>` of a response; without tags, its last line. Both may be an equation.

    Raises UserError if the ground truth is no integer.
    """
    product = exact_integer(ground_truth)
    answer, tagged = answer_of(solution_str)
    read = _read(answer)
    if read is None:
        return 0.0
    number, is_consistent = read
    if number == product and is_consistent:
        return CORRECT
    return WELL_FORMED if tagged else 0.0


def right_answer(ground_truth: object) -> str:
    """Return a response that scores 1.0. Raises UserError if the ground truth is no integer."""
    return f"<answer>{exact_integer(ground_truth)}</answer>"


def answer_in(text: str) -> str:
    """Return the integer that is scored; '' if there is none."""
    read = _read(answer_of(text)[0])
    return "" if read is None else str(read[0])


def _read(answer: str) -> tuple[int, bool] | None:
    """Return the integer of an answer, and whether all sides of its equation have this value; None for no answer."""
    if len(answer) > _MAX_CHARACTERS:
        return None
    plain = without_markup(_TIMES.sub("*", join_thousands(as_ascii(answer))))
    *sides, last = [" ".join(side.replace(GAP, " ").split()) for side in plain.split("=")]
    found = _INTEGER.fullmatch(last)
    if found is None:
        return None
    number = -int(found[1]) if last.startswith("-") else int(found[1])
    if sides and not sides[0]:  # an answer may begin with `=`
        sides = sides[1:]
    values = [_value(side) for side in sides if not is_name(side)]
    if None in values:
        return None
    return number, all(value == number for value in values)


def _value(side: str) -> Number | None:
    """Return the value of one side of an equation; None if it is no arithmetic."""
    try:
        return evaluate(side)[0]
    except ValueError:
        return None
