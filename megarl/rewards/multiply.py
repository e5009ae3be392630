"""Multiply: the product of two integers. The ground truth is the product.

The scores are those of TinyZero's `multiply.compute_score`, which reads fewer answers: only digits with a sign, in
tags.
"""

import re
from collections.abc import Mapping
from typing import Any

from megarl.rewards.tags import answer_of

CORRECT = 1.0
WELL_FORMED = 0.1
"""Score of an integer in answer tags that is not the product."""

# the bound keeps a hostile answer cheap; commas may separate thousands, and decimals may be zeros
_INTEGER = re.compile(r"[-+]?(?:[0-9]{1,40}|[0-9]{1,3}(?:,[0-9]{3}){1,12})(?:\.0{0,40})?")
_AROUND = " \t\r\n$*"  # money, mathematics and bold type


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Score the last `<answer>...</answer>` of a response; without tags, the text after `=` in its last line."""
    number, tagged = _integer(solution_str)
    if number is None:
        return 0.0
    if number == int(ground_truth):
        return CORRECT
    return WELL_FORMED if tagged else 0.0


def answer_in(text: str) -> str:
    """Return the integer that is scored; '' if there is none."""
    number, _ = _integer(text)
    return "" if number is None else str(number)


def _integer(text: str) -> tuple[int | None, bool]:
    """Return the integer, and whether it is in answer tags."""
    words, tagged = answer_of(text)
    number = words.rpartition("=")[2].rstrip(_AROUND + ".").lstrip(_AROUND)
    if not _INTEGER.fullmatch(number):
        return None, tagged
    return int(number.partition(".")[0].replace(",", "")), tagged
