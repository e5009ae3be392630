"""Arithmetic of shell scripts: whole numbers, the operators of C, and variables. Nothing else is evaluated."""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Protocol

_TOKEN = re.compile(r"\w+|\*\*|\+\+|--|&&|\|\||[-+*/%]=|[<>=!]=|\S")
_NAME = re.compile(r"[A-Za-z_]\w*")
_LARGEST = 10**30
_LARGEST_POWER = 60
_MOST_CHARACTERS = 500


def _divide(left: int, right: int) -> int:
    """Return the quotient, rounded towards zero as in C."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _power(base: int, exponent: int) -> int:
    if not 0 <= exponent <= _LARGEST_POWER:
        raise ValueError
    return int(base**exponent)


_TIGHTNESS = {
    **{",": 0, "?": 2, "||": 3, "&&": 4, "==": 5, "!=": 5, "<": 6, "<=": 6, ">": 6, ">=": 6},
    **{"+": 7, "-": 7, "*": 8, "/": 8, "%": 8, "**": 9},
}
"""Operator -> how tightly it binds."""
_ASSIGNMENT = 1
_UNARY = 10
_COMPUTED: Mapping[str, Callable[[int, int], int]] = {
    ",": lambda left, right: right,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": lambda left, right: left - right * _divide(left, right),
    "**": _power,
}


class Variables(Protocol):
    """The variables of a script."""

    def plain(self, name: str) -> str:
        """Return the text of a variable, a number or an expression; empty = 0."""

    def set(self, name: str, text: str) -> None:
        """Give a variable its text."""


class _Expression:
    """Reads an expression token by token, and computes it. A branch that is not chosen is read without effect."""

    def __init__(self, text: str, variables: Variables) -> None:
        self.tokens = [*_TOKEN.findall(text), ""]
        self.index = 0
        self.variables = variables
        self.is_chosen = True

    @property
    def next(self) -> str:
        """The next token; '' at the end."""
        return self.tokens[self.index]

    def value(self, least: int = 0) -> int:
        """Return the value of operands and of the operators between them that bind at least as tightly as `least`."""
        left = self._operand(least)
        while _TIGHTNESS.get(self.next, -1) >= least:
            sign = self._take()
            tightness = _TIGHTNESS[sign]
            if sign == "?":
                one = self._value_if(left, _ASSIGNMENT)
                self._take(":")
                other = self._value_if(not left, tightness)
                left = one if left else other
            elif sign in ("||", "&&"):
                is_decided = bool(left) == (sign == "||")
                right = self._value_if(not is_decided, tightness + 1)
                left = int(bool(left if is_decided else right))
            else:
                left = self._computed(sign, left, self.value(tightness + (sign != "**")))
        return left

    def _value_if(self, is_chosen: object, least: int) -> int:
        outer = self.is_chosen
        self.is_chosen = outer and bool(is_chosen)
        value = self.value(least)
        self.is_chosen = outer
        return value

    def _computed(self, sign: str, left: int, right: int) -> int:
        value = _COMPUTED[sign](left, right) if self.is_chosen else 0
        if abs(value) > _LARGEST:
            raise ValueError
        return int(value)

    def _take(self, wanted: str = "") -> str:
        token = self.next
        if not token or (wanted and token != wanted):
            raise ValueError
        self.index += 1
        return token

    def _operand(self, least: int) -> int:
        token = self._take()
        if token == "(":
            inner = self.value()
            self._take(")")
            return inner
        if token in ("-", "+", "!"):
            operand = self._operand(_UNARY)
            return int(not operand) if token == "!" else self._computed(token, 0, operand)
        if token in ("++", "--"):
            return self._assign(self._take(), token, 1)
        if token[0].isdigit():  # octal after 0, hexadecimal after 0x
            return int(token, 8) if token.startswith("0") and token.isdigit() else int(token, 0)
        if self.next in ("++", "--"):
            sign = self._take()
            return self._computed("-", self._assign(token, sign, 1), 1 if sign == "++" else -1)
        if least <= _ASSIGNMENT and self.next in ("=", "+=", "-=", "*=", "/=", "%="):
            return self._assign(token, self._take(), self.value(_ASSIGNMENT))
        return self._variable(token)

    def _variable(self, name: str) -> int:
        if not _NAME.fullmatch(name):
            raise ValueError
        return evaluate(self.variables.plain(name), self.variables) if self.is_chosen else 0

    def _assign(self, name: str, sign: str, value: int) -> int:
        """Give a variable its value by `=`, or change it by `+=`, `++` and the like."""
        before = 0 if sign == "=" else self._variable(name)
        new = self._computed("+" if sign == "=" else sign[0], before, value)
        if not _NAME.fullmatch(name):
            raise ValueError
        if self.is_chosen:
            self.variables.set(name, str(new))
        return new


def evaluate(text: str, variables: Variables) -> int:
    """Return the value of an expression, which may change variables; 0 for an empty text.

    Raises:
        ValueError: it is no such expression, or its numbers are too large.
        ZeroDivisionError: it divides by zero.
        RecursionError: a variable has its own name in its text.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError
    if not text.strip():
        return 0
    expression = _Expression(text, variables)
    value = expression.value()
    if expression.next:
        raise ValueError
    return value
