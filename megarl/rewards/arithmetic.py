"""Arithmetic as Python reads it, without Python's `eval`: numerals, + - * / // **, signs, parentheses, white space.

The caller defines the values of numerals and operators: numbers, or the terms of a computer algebra system.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_CHARACTERS = 1000
MAX_DEPTH = 64
"""Bound on nested parentheses, signs and powers."""

Value = TypeVar("Value")

_TOKEN = re.compile(r"[0-9]+\.?[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|\*\*|//|[-+*/()]")
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "**": 4}
_BINDING_OF_SIGN = 3  # before its only operand
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
    value = parser.value()
    if parser.tokens[0]:
        raise ValueError(f"{parser.tokens[0]!r} is not expected here")
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
    """Parses by the strength with which signs bind. A numeral or a parenthesis may have signs of its own before it."""

    def __init__(self, tokens: list[str], operations: Operations[Value]) -> None:
        self.tokens = deque([*tokens, ""])
        self._operations = operations

    def value(self, depth: int = 0, weakest: int = 1) -> Value:
        """Return the value of the text up to the next sign that binds less than `weakest`."""
        value = self._operand(depth)
        while _BINDING.get(self.tokens[0], 0) >= weakest:
            sign = self.tokens.popleft()
            place = (depth + 1, _BINDING_OF_SIGN) if sign == "**" else (depth, _BINDING[sign] + 1)
            value = self._operations.binary[sign](value, self.value(*place))
        return value

    def _operand(self, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        token = self.tokens.popleft()
        if token in ("+", "-"):
            return self._operations.unary[token](self.value(depth + 1, _BINDING_OF_SIGN))
        if token == "(":
            value = self.value(depth + 1)
            if self.tokens.popleft() != ")":
                raise ValueError("a parenthesis is not closed")
            return value
        if not token or token in _BINDING or token == ")":
            raise ValueError(f"{token!r} is not a number")
        return self._operations.number(token)
