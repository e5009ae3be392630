"""Arithmetic as Python reads it, without Python's `eval`: numerals, + - * / // **, signs, parentheses, white space.

The caller defines the values of numerals and operators: numbers, or the terms of a computer algebra system.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_CHARACTERS = 1000
MAX_DEPTH = 64
"""Bound on nested parentheses, signs and powers."""

Value = TypeVar("Value")

_TOKEN = re.compile(r"[0-9]+\.?[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|\*\*|//|[-+*/()]")
_LEADING_ZEROS = re.compile("0+[1-9][0-9]*")
_SPACES, _SPACES_IN_PARENTHESES = " \t\f", " \t\f\r\n"  # the white space that Python accepts


@dataclass(frozen=True, kw_only=True)
class Operations(Generic[Value]):
    """The values of the parts of an expression."""

    number: Callable[[str], Value]
    unary: Mapping[str, Callable[[Value], Value]]  # by the signs + and -
    binary: Mapping[str, Callable[[Value, Value], Value]]  # by + - * / // **


def read(text: str, operations: Operations[Value]) -> Value:
    """Return the value of an expression, with the precedence of Python's operators.

    Raises ValueError for anything that is not arithmetic of numbers in Python, and beyond the bounds above.
    """
    parser = _Parser(_tokens(text.strip()), operations)
    value = parser.sum(depth=0)
    if parser.next is not None:
        raise ValueError(f"{parser.next!r} is not expected here")
    return value


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")
    tokens = list[str]()
    position = 0
    num_open = 0
    while position < len(text):
        if text[position] in (_SPACES_IN_PARENTHESES if num_open else _SPACES):
            position += 1
            continue
        match = _TOKEN.match(text, position)
        if match is None or _LEADING_ZEROS.fullmatch(match[0]):
            raise ValueError(f"not arithmetic from {text[position:]!r}")
        num_open += {"(": 1, ")": -1}.get(match[0], 0)
        tokens.append(match[0])
        position = match.end()
    return tokens


class _Parser(Generic[Value]):
    """Parses by recursive descent.

    sum = product {(+|-) product}; product = factor {(*|/|//) factor}; factor = (+|-) factor | power;
    power = atom [** factor]; atom = numeral | (sum).
    """

    def __init__(self, tokens: list[str], operations: Operations[Value]) -> None:
        self._tokens = tokens
        self._position = 0
        self._operations = operations

    @property
    def next(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def sum(self, depth: int) -> Value:
        value = self._product(depth)
        while self.next in ("+", "-"):
            value = self._operations.binary[self._take()](value, self._product(depth))
        return value

    def _product(self, depth: int) -> Value:
        value = self._factor(depth)
        while self.next in ("*", "/", "//"):
            value = self._operations.binary[self._take()](value, self._factor(depth))
        return value

    def _factor(self, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if self.next in ("+", "-"):
            return self._operations.unary[self._take()](self._factor(depth + 1))
        value = self._atom(depth)
        if self.next == "**":
            value = self._operations.binary[self._take()](value, self._factor(depth + 1))
        return value

    def _atom(self, depth: int) -> Value:
        token = self._take()
        if token == "(":
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise ValueError("a parenthesis is not closed")
            return value
        if token[0] not in ".0123456789":
            raise ValueError(f"{token!r} is not a number")
        return self._operations.number(token)

    def _take(self) -> str:
        token = self.next
        if token is None:
            raise ValueError("the expression ends too early")
        self._position += 1
        return token
