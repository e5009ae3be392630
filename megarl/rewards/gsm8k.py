"""GSM8K: the number after `####` (strict), or the last number of the response (flexible), equals the ground truth.

The line of the strict rule holds the number and its unit, and nothing else: `#### 18 or 19` and `#### 18/5` have no
answer.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from megarl.rewards.notation import as_ascii, exact_number, join_thousands, without_markup

_MARK = "####"
_DIGITS = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_POWER = r"(?:\^[23]|[²³])?"
_LETTER = r"[^\W\d_²³]"
_UNIT = rf"(?:%|°[CF]?|{_LETTER}(?:{_LETTER}|['’])*\.?{_POWER}(?:/{_LETTER}+{_POWER})?)"
_LINE = re.compile(
    rf"(?:[a-zA-Z][a-zA-Z'’ ]{{0,30}}[=:] ?)?([-+]?) ?[$€£¥]? ?(-?) ?({_DIGITS}) ?[$€£¥]?"
    rf"(?: ?\(?({_UNIT}(?: {_UNIT}){{0,7}})\)?)?[ .!$]*"
)
"""A line with an answer: perhaps a name and `=`, the number with its sign and currency, and up to 8 words of a unit."""
_NO_UNITS = re.compile(
    r"\b(?:[eikxy]|bn|(?:thousand|million|billion|trillion|hundred|dozen|third|quarter)s?|half|halves|point|plus|minus"
    r"|times|divided|over|or|and|not|no|nor|to|wrong|false|incorrect|either|maybe)\b",
    re.IGNORECASE,
)
"""Words after a number that change it, or take it back."""
# a minus after a digit or a parenthesis is a subtraction, not a sign
_FLEXIBLE = re.compile(rf"(?:(?<![0-9.)])-)?\$?{_DIGITS}")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Return 1.0 if the number after the last `####` is correct, else 0.0. UserError if the truth is no number."""
    return float(exact_number(ground_truth) == extract_strict(solution_str))


def compute_score_flexible(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Return 1.0 if the last number of the response is correct, else 0.0. UserError if the truth is no number."""
    return float(exact_number(ground_truth) == extract_flexible(solution_str))


def right_answer(ground_truth: Any) -> str:
    """Return a response that both rules score 1.0. Raises UserError if the ground truth is no number."""
    return f"{_MARK} {exact_number(ground_truth):f}"


def extract_strict(text: str) -> Decimal | None:
    """Return the number on the line after the last `####`; None if the line holds anything but it and its unit."""
    said = next((part for part in reversed(text.split(_MARK)[1:]) if part.strip()), "").lstrip()
    line = without_markup(join_thousands(as_ascii(said.partition("\n")[0]))).strip()
    found = _LINE.fullmatch(" ".join(line.strip("$ ").split()))
    if found is None or _NO_UNITS.search(found[4] or ""):
        return None
    sign, second_sign, digits = found[1], found[2], found[3]
    if sign and second_sign:
        return None
    return Decimal(("-" if "-" in sign + second_sign else "") + digits)


def extract_flexible(text: str) -> Decimal | None:
    """Return the last number; None if there is none."""
    answers = _FLEXIBLE.findall(join_thousands(as_ascii(text)))
    return Decimal(answers[-1].replace("$", "")) if answers else None


def answer_in(text: str) -> str:
    """Return the answer of the strict rule, the same text for equal numbers; '' if there is none."""
    return _text(extract_strict(text))


def answer_in_flexible(text: str) -> str:
    """Return the answer of the flexible rule, the same text for equal numbers; '' if there is none."""
    return _text(extract_flexible(text))


def _text(number: Decimal | None) -> str:
    if number is None:
        return ""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
