"""Countdown: reach a target with the given numbers, each used once, by + - * / and parentheses.

The ground truth is `{target, numbers}`, and the scores are those of TinyZero. Answers are parsed, never evaluated as
code, in exact fractions, and every bound below keeps a hostile answer cheap.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from megarl.rewards.tags import answer_of

CORRECT = 1.0
WELL_FORMED = 0.1
"""For an answer in its tags, or an expression that parses, which does not solve the problem."""

MAX_CHARACTERS = 256
MAX_DEPTH = 16
MAX_DIGITS = 12

_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Score a response: its last `<answer>...</answer>`, or where it has none, its last line that is not empty."""
    answer, tagged = answer_of(solution_str)
    try:
        value, numbers = evaluate(answer)
    except ValueError:
        return WELL_FORMED if tagged else 0.0
    solved = value == ground_truth["target"] and sorted(numbers) == sorted(ground_truth["numbers"])
    return CORRECT if solved else WELL_FORMED


def answer_in(text: str) -> str:
    """The expression that is scored, without spaces; '' where it is none."""
    expression, _ = answer_of(text)
    try:
        evaluate(expression)
    except ValueError:
        return ""
    return "".join(expression.split())


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The value of an arithmetic expression and the numbers in it.

    Raises ValueError for anything but integers, + - * / and parentheses, for a division by zero, and past the bounds.
    """
    parser = _Parser(_tokens(text))
    value = parser.sum(depth=0)
    if parser.next is not None:
        raise ValueError(f"{parser.next!r} is not expected here")
    return value, parser.numbers


def _tokens(text: str) -> list[str]:
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or len(match[1]) > MAX_DIGITS:
            raise ValueError(f"not arithmetic from {text[position:]!r}")
        tokens.append(match[1])
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent: sum = product {(+|-) product}; product = factor {(*|/) factor}; factor = [-] (int | (sum))."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0
        self.numbers: list[int] = []

    @property
    def next(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def sum(self, *, depth: int) -> Fraction:
        value = self._product(depth)
        while self.next in ("+", "-"):
            value = value + self._product(depth) if self._take() == "+" else value - self._product(depth)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self.next in ("*", "/"):
            if self._take() == "*":
                value *= self._factor(depth)
                continue
            divisor = self._factor(depth)
            if divisor == 0:
                raise ValueError("division by zero")
            value /= divisor
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        token = self._take()
        if token == "-":
            return -self._factor(depth + 1)
        if token == "(":
            value = self.sum(depth=depth + 1)
            if self._take() != ")":
                raise ValueError("a parenthesis is not closed")
            return value
        if not token.isdigit():
            raise ValueError(f"{token!r} is not a number")
        self.numbers.append(int(token))
        return Fraction(self.numbers[-1])

    def _take(self) -> str:
        token = self.next
        if token is None:
            raise ValueError("the expression ends too early")
        self._position += 1
        return token
