"""GSM8K: the number after `####` (strict), or the last number of the response (flexible), equals the ground truth."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

# a minus behind a digit or a parenthesis is a subtraction, not a sign
_NUMBER = r"(?:(?<![0-9.)])-)?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_STRICT = re.compile(rf"####\s*({_NUMBER})")
_FLEXIBLE = re.compile(_NUMBER)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """1.0 where the number after the last `####` is right, else 0.0."""
    return _score(extract_strict(solution_str), ground_truth)


def compute_score_flexible(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """1.0 where the last number of the response is right, else 0.0."""
    return _score(extract_flexible(solution_str), ground_truth)


def extract_strict(text: str) -> Decimal | None:
    """The number after the last `####`."""
    answers = _STRICT.findall(text)
    return _decimal(answers[-1]) if answers else None


def extract_flexible(text: str) -> Decimal | None:
    """The last number."""
    answers = _FLEXIBLE.findall(text)
    return _decimal(answers[-1]) if answers else None


def answer_in(text: str) -> str:
    """The answer that is scored strictly, the same text for the same number; '' where there is none."""
    return _text(extract_strict(text))


def answer_in_flexible(text: str) -> str:
    """The answer that is scored flexibly, the same text for the same number; '' where there is none."""
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
