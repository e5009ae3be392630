"""GSM8K: the number after `####` (strict), or the last number of the response (flexible), equals the ground truth."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

# a minus after a digit or a parenthesis is a subtraction, not a sign
_NUMBER = r"(?:(?<![0-9.)])-)?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_STRICT = re.compile(rf"####\s*({_NUMBER})")
_FLEXIBLE = re.compile(_NUMBER)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Return 1.0 if the number after the last `####` is correct, else 0.0."""
    return _score(extract_strict(solution_str), ground_truth)


def compute_score_flexible(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Return 1.0 if the last number of the response is correct, else 0.0."""
    return _score(extract_flexible(solution_str), ground_truth)


def extract_strict(text: str) -> Decimal | None:
    """Return the number after the last `####`; None if there is none."""
    answers = _STRICT.findall(text)
    return _decimal(answers[-1]) if answers else None


def extract_flexible(text: str) -> Decimal | None:
    """Return the last number; None if there is none."""
    answers = _FLEXIBLE.findall(text)
    return _decimal(answers[-1]) if answers else None


def answer_in(text: str) -> str:
    """Return the answer of the strict rule, the same text for equal numbers; '' if there is none."""
    return _text(extract_strict(text))


def answer_in_flexible(text: str) -> str:
    """Return the answer of the flexible rule, the same text for equal numbers; '' if there is none."""
    return _text(extract_flexible(text))


def _score(answer: Decimal | None, ground_truth: Any) -> float:
    return float(answer is not None and answer == _decimal(str(ground_truth)))


def _text(number: Decimal | None) -> str:
    if number is None:
        return ""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", "").strip())
