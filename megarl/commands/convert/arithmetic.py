"""Arithmetic of shell scripts: whole numbers, the operators of C, and variables. Nothing else is evaluated."""

import operator
import re
from collections.abc import Callable, Mapping

_TOKEN = re.compile(r"\s*(?:(\d\w*)|([A-Za-z_]\w*)|(\*\*|\+\+|--|&&|\|\||[-+*/%]=|[<>=!]=|[-+*/%<>=!?:(),]))")
_LARGEST = 10**30
_LARGEST_POWER = 60
_MOST_CHARACTERS = 500

Lazy = Callable[[], int]
"""Returns a value, and assigns what the expression assigns."""


def _divide(left: int, right: int) -> int:
    """Return the quotient, rounded towards zero as in C."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _power(base: int, exponent: int) -> int:
    if not 0 <= exponent <= _LARGEST_POWER:
        raise ValueError
    return int(base**exponent)


_OPERATORS: Mapping[str, tuple[int, Callable[[int, int], int]]] = {
    "==": (3, operator.eq),
    "!=": (3, operator.ne),
    "<": (4, operator.lt),
    "<=": (4, operator.le),
    ">": (4, operator.gt),
    ">=": (4, operator.ge),
    "+": (5, operator.add),
    "-": (5, operator.sub),
    "*": (6, operator.mul),
    "/": (6, _divide),
    "%": (6, lambda left, right: left - right * _divide(left, right)),
    "**": (7, _power),
}
"""Operator -> how tightly it binds, and what it computes."""
_OR, _AND, _RIGHT = 1, 2, 7


class _Expression:
    """Reads an expression, token by token."""

    def __init__(self, text: str, read: Callable[[str], int], write: Callable[[str, int], None]) -> None:
        self.tokens = list(_tokens(text))
        self.index = 0
        self.read = read
        self.write = write

    def whole(self) -> int:
        value = self._sequence()
        if self.index < len(self.tokens):
            raise ValueError
        return value()

    def _peek(self) -> str:
        return self.tokens[self.index] if self.index < len(self.tokens) else ""

    def _take(self, wanted: str = "") -> str:
        token = self._peek()
        if not token or (wanted and token != wanted):
            raise ValueError
        self.index += 1
        return token

    def _sequence(self) -> Lazy:
        """Read expressions with commas between them, whose value is the last one's."""
        parts = [self._assignment()]
        while self._peek() == ",":
            self._take()
            parts.append(self._assignment())
        return lambda: [part() for part in parts][-1]

    def _assignment(self) -> Lazy:
        following = self.tokens[self.index + 1 : self.index + 2]
        if not (self._peek().isidentifier() and following and following[0] in ("=", "+=", "-=", "*=", "/=", "%=")):
            return self._choice()
        name, sign = self._take(), self._take()
        value = self._assignment()
        if sign == "=":
            return lambda: self._assign(name, value())
        compute = _OPERATORS[sign[0]][1]
        return lambda: self._assign(name, compute(self.read(name), value()))

    def _assign(self, name: str, value: int) -> int:
        self.write(name, _bounded(value))
        return value

    def _choice(self) -> Lazy:
        """Read `condition ? one : other`."""
        condition = self._binary(_OR)
        if self._peek() != "?":
            return condition
        self._take()
        one = self._assignment()
        self._take(":")
        other = self._assignment()
        return lambda: one() if condition() else other()

    def _binary(self, least: int) -> Lazy:
        """Read operands and the operators between them that bind at least as tightly as `least`."""
        left = self._operand()
        while True:
            token = self._peek()
            if token in ("||", "&&") and (_OR if token == "||" else _AND) >= least:
                self._take()
                left = _logical(token, left, self._binary(_AND if token == "||" else _AND + 1))
            elif token in _OPERATORS and _OPERATORS[token][0] >= least:
                tightness, compute = _OPERATORS[self._take()]
                left = _computed(compute, left, self._binary(tightness + (tightness < _RIGHT)))
            else:
                return left

    def _operand(self) -> Lazy:
        token = self._take()
        if token == "(":
            inner = self._sequence()
            self._take(")")
            return inner
        if token in ("-", "+", "!"):
            value = self._operand()
            return (lambda: int(not value())) if token == "!" else (lambda: -value() if token == "-" else value())
        if token in ("++", "--"):
            return self._step(self._take(), token, is_before=True)
        if token[0].isdigit():
            number = _number(token)
            return lambda: number
        if not token.isidentifier():
            raise ValueError
        if self._peek() in ("++", "--"):
            return self._step(token, self._take(), is_before=False)
        return lambda: self.read(token)

    def _step(self, name: str, sign: str, *, is_before: bool) -> Lazy:
        """Return `++name` or `name++`."""
        if not name.isidentifier():
            raise ValueError

        def value() -> int:
            old = self.read(name)
            new = self._assign(name, old + (1 if sign == "++" else -1))
            return new if is_before else old

        return value


def _tokens(text: str) -> list[str]:
    if len(text) > _MOST_CHARACTERS:
        raise ValueError
    found = []
    index, text = 0, text.rstrip()
    while index < len(text):
        match = _TOKEN.match(text, index)
        if not match:
            raise ValueError
        found.append(match[match.lastindex or 0])
        index = match.end()
    return found


def _number(text: str) -> int:
    """Return a number: octal after 0, hexadecimal after 0x, else decimal. Raises ValueError if it is none."""
    return int(text, 8) if text.startswith("0") and text.isdigit() else int(text, 0)


def _bounded(value: int) -> int:
    if abs(value) > _LARGEST:
        raise ValueError
    return int(value)


def _computed(compute: Callable[[int, int], int], left: Lazy, right: Lazy) -> Lazy:
    return lambda: _bounded(compute(left(), right()))


def _logical(token: str, left: Lazy, right: Lazy) -> Lazy:
    if token == "||":
        return lambda: int(bool(left() or right()))
    return lambda: int(bool(left() and right()))


def evaluate(text: str, read: Callable[[str], str], write: Callable[[str, str], None]) -> int:
    """Return the value of an expression.

    Args:
        text: the expression; without one the value is 0.
        read: returns the text of a variable, which is a number or an expression; empty = 0.
        write: gives a variable its text.

    Raises:
        ValueError: it is no such expression, or its numbers are too large.
        ZeroDivisionError: it divides by zero.
        RecursionError: a variable has its own name in its text.
    """

    def read_number(name: str) -> int:
        return evaluate(read(name), read, write)

    def write_number(name: str, value: int) -> None:
        write(name, str(value))

    return _Expression(text, read_number, write_number).whole() if text.strip() else 0
