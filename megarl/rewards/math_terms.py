"""Math-verify, held: what it reads and compares is never run as code, and its powers are bounded.

Sympy computes the expressions that math-verify reads, and a tower of powers may take any time and memory. Sympy reads
numerals, and math-verify reads arithmetic in plain text, with Python's `eval`. This module replaces both by megarl's
own parser. Math-verify's own timers, which count the load of the machine, are off.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module
from itertools import product
from operator import floordiv
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from megarl.platform.patching import declare, replaced
from megarl.rewards.arithmetic import Operations, read

if TYPE_CHECKING:
    from sympy import Basic, Expr, Number, Rational

Power = Callable[["Rational", "Number"], "Basic | None"]
"""Sympy's method for powers: base and exponent -> the power, None if it stays as it is."""
PARSERS = tuple(
    declare(
        module,
        "parse_expr",
        library="math-verify",
        versions=">=0.9,<0.10",
        reason="reads plain text of a response by `eval`",
        upstream="sympy/parsing/sympy_parser.py: parse_expr, whose docstring warns of `eval`",
        until="sympy parses without `eval`",
    )
    for module in ("sympy.parsing.sympy_parser", "latex2sympy2_extended.latex2sympy2", "math_verify.parser")
)
COMPILER = declare(
    "sympy.utilities.lambdify",
    *("compile", "eval", "exec"),
    library="math-verify",
    versions=">=0.9,<0.10",
    reason="writes the names of symbols, which may be any text, into code and runs it",
    upstream="sympy/utilities/lambdify.py: lambdify",
    until="sympy evaluates numerically without generated code",
)
POWERS = tuple(
    declare(
        f"sympy.core.numbers:{name}",
        "_eval_power",
        library="math-verify",
        versions=">=0.9,<0.10",
        reason="computes powers of any size, and nothing can interrupt Python's product of large integers",
        upstream=f"sympy/core/numbers.py: {name}._eval_power",
        until="sympy bounds the size of the integers that it computes",
    )
    for name in ("Integer", "Rational")
)
_MAX_DIFFERENCE = 1e-5
"""Most relative difference of equal numbers: `0.083333` is a twelfth."""
MAX_BITS = 100_000  # D279
"""Most bits of a power of integers; sympy refuses a larger power, and the answer is wrong."""


@cache
def load() -> ModuleType:
    """Import math-verify, which takes a second, and the modules that it imports at its first call."""
    import_module("sympy.physics.units")  # defines names by `parse_expr`, which `bounded` replaces
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timers are off
    return import_module("math_verify")


def verified(answer: str, truth: str) -> bool:
    """Return whether math-verify accepts an answer in LaTeX as equal to the truth. Its time is not bounded here."""
    load()
    with bounded():
        gold, found = (parsed(text) for text in (truth, answer))
        return bool(load().verify(gold, found, timeout_seconds=None))


def nearly_equal(answer: str, truth: str) -> bool:
    """Return whether the numbers of two answers have the same signs and differ by less than a part of 100,000.

    Math-verify compares decimals by their first six places, so to it all small numbers are equal. Values that are no
    real numbers, points or sets of them are not compared here.
    """
    texts = [text.replace("\\%", "").replace("%", "") for text in (answer, truth)]
    only_one_has_percent = (texts[0] == answer) != (texts[1] == truth)
    factors = (1, 100) if only_one_has_percent else (1,)
    with bounded():
        found, gold = (_numbers(next(iter(parsed(text)), None)) for text in texts)
    if found is None or gold is None or len(found) != len(gold):
        return True
    pairs = list(zip(found, gold, strict=True))
    return any(all(_is_near(one * a, other * b) for one, other in pairs) for a, b in product(factors, repeat=2))


def _is_near(one: "Number", other: "Number") -> bool:
    if one.is_infinite or other.is_infinite:
        return bool(one == other)
    return bool(abs(one - other) <= _MAX_DIFFERENCE * max(abs(one), abs(other)))


def _numbers(value: object) -> "list[Number] | None":
    """Return the real numbers of a number, a point or a set, with infinity; None if there are others."""
    import sympy

    if isinstance(value, sympy.FiniteSet | sympy.Tuple | sympy.Interval):
        members = value.args[:2] if isinstance(value, sympy.Interval) else value.args  # an interval has flags too
        numbers: list[Number] = []
        for member in members:
            part = _numbers(member)
            if part is None:
                return None
            numbers += part
        return sorted(numbers) if isinstance(value, sympy.FiniteSet) else numbers
    if not isinstance(value, sympy.Expr) or value.free_symbols:
        return None
    try:
        number = value.evalf(15)
    except (TypeError, ValueError, ArithmeticError, NotImplementedError, AttributeError):
        return None
    return [number] if number.is_Number and number.is_extended_real else None


def parsed(text: str) -> "list[Basic | str]":
    """Return the values that math-verify reads in an answer in LaTeX. Call it in `bounded`."""
    return load().parse(f"\\boxed{{{text}}}", parsing_timeout=None)


@contextmanager
def bounded() -> Iterator[None]:
    """Make sympy and math-verify read plain text with `term` instead of `parse_expr`, which calls `eval`.

    Sympy's other way from text to code, `lambdify`, writes the names of symbols into code, and names may be any text.
    It is disabled: sympy computes the same in another way, or not at all. Powers are bounded by `MAX_BITS`.
    """
    with ExitStack() as stack:
        for parser in PARSERS:
            stack.enter_context(replaced(parser, parse_expr=term))
        for numbers in POWERS:
            stack.enter_context(replaced(numbers, _eval_power=_power_of(numbers.original("_eval_power"))))
        stack.enter_context(replaced(COMPILER, compile=_refuse, eval=_refuse, exec=_refuse))
        yield


def _power_of(compute: Power) -> Power:
    """Return sympy's method for powers with a bound on the bits of the result."""

    def power(base: "Rational", exponent: "Number") -> "Basic | None":
        largest = max(abs(base.p), base.q)
        is_large = (
            exponent.is_Rational and largest > 1 and largest.bit_length() * abs(exponent.p) > MAX_BITS * exponent.q
        )
        if is_large:
            raise OverflowError("a power too large")
        return compute(base, exponent)

    return power


def _refuse(*arguments: object, **options: object) -> NoReturn:
    raise NotImplementedError("code made from a response is not run")


def term(text: str, *arguments: object, evaluate: bool | None = None, **options: object) -> "Expr":
    """Return arithmetic as a term of sympy. Raises ValueError for anything else."""
    import sympy

    add, multiply, power = (partial(make, evaluate=evaluate is not False) for make in (sympy.Add, sympy.Mul, sympy.Pow))

    def number(numeral: str) -> "Expr":
        return sympy.Integer(int(numeral)) if numeral.isdigit() else sympy.Float(numeral)

    def minus(term: "Expr") -> "Expr":
        return -term if term.is_Number else multiply(-1, term)

    def subtract(left: "Expr", right: "Expr") -> "Expr":
        return add(left, minus(right))

    def divide(left: "Expr", right: "Expr") -> "Expr":
        return multiply(left, power(right, -1))

    operations = Operations(
        number=number,
        unary={"+": lambda term: term, "-": minus},
        binary={"+": add, "-": subtract, "*": multiply, "/": divide, "//": floordiv, "**": power},
    )
    return read(text, operations)
