"""The ways in which people and models write a number or an expression, made plain for the rules."""

import re
from decimal import Decimal

from megarl.platform.errors import UserError

_AS_ASCII = str.maketrans(
    {
        **dict.fromkeys("−–‒﹣－", "-"),  # the minus sign, dashes and wide forms
        **dict.fromkeys("×∙⋅·∗＊", "*"),
        **dict.fromkeys("÷∕／", "/"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000", " "),
        **dict(zip("０１２３４５６７８９＋＝（）．，：％＄", "0123456789+=().,:%$", strict=True)),
    }
)
_SEPARATOR = r"\\[,! ;:]|,\\!|\{,\}|[,~ ]"
_THOUSANDS = re.compile(rf"(?<![0-9.,])([1-9][0-9]{{0,2}})(({_SEPARATOR})[0-9]{{3}}(?:\3[0-9]{{3}})*)(?![0-9]|,[0-9])")
_BETWEEN = re.compile(r"[^0-9]+")
NUMERAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
"""The pattern of a number without a sign, after `join_thousands`."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
MAX_DIGITS = 400
"""Most digits of a ground truth, before and behind the decimal point."""


def as_ascii(text: str) -> str:
    """Replace other signs for minus, times, divided by, spaces and digits by those of ASCII."""
    return text.translate(_AS_ASCII)


def join_thousands(text: str) -> str:
    r"""Join the groups of three digits of numbers: `1,000`, `1 000`, `1\,000`, `1{,}000` and `1~000` become `1000`.

    The first group has one to three digits and begins with none but 1 to 9: `0,500` stays as it is.
    """
    return _THOUSANDS.sub(lambda number: number[1] + _BETWEEN.sub("", number[2]), text)


def exact_number(value: object) -> Decimal:
    """Return the number that a ground truth is: a number, or a text that is one number and nothing else.

    Raises UserError for anything else, also for NaN, for a truth value, for a number with a unit and for one with more
    than `MAX_DIGITS` digits.
    """
    text = join_thousands(str(value).strip()).removeprefix("$")
    is_text = isinstance(value, str) and _NUMBER.fullmatch(text) and len(text) <= MAX_DIGITS
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool) and Decimal(value).is_finite()
    if not is_text and not is_number:
        raise UserError(f"the ground truth {value!r} is not one number")
    number = Decimal(text)
    if abs(number.adjusted()) >= MAX_DIGITS:
        raise UserError(f"the ground truth {number:.3g} has more than {MAX_DIGITS} digits")
    return number


def exact_integer(value: object) -> int:
    """Return the integer that a ground truth is. Raises UserError for anything else."""
    number = exact_number(value)
    if number != number.to_integral_value():
        raise UserError(f"the ground truth {value!r} is no integer")
    return int(number)
