"""Whether an answer in LaTeX equals a ground truth: math-verify's verdict on what the grammar derives."""

from megarl.rewards import math_forms as forms
from megarl.rewards.math_grammar import derives, is_name
from megarl.rewards.math_syntax import formula_of
from megarl.rewards.math_terms import bounded, nearly_equal, parsed, verified
from megarl.rewards.units import exclude

MAX_CHARACTERS = 1000
"""Most characters of an answer that is compared, six times the longest of MATH: math-verify's time is superlinear."""


def equal(answer: str, truth: str) -> bool:
    """Return whether an answer in LaTeX is right: math-verify accepts it, and it holds nothing else.

    Every side of an equation counts, except a name; words are compared by their letters, numbers in a base by both.
    """
    if len(answer) > MAX_CHARACTERS:
        return False
    found = forms.plain(answer)
    gold = forms.plain(truth)
    if forms.flat(found) == forms.flat(gold):
        return True
    same_words = forms.same_words(found, gold)
    if same_words is not None:
        return same_words
    if forms.meridiem(found) != forms.meridiem(gold):
        return False
    if exclude(forms.quantities(found), forms.quantities(gold)) or not forms.same_points(found, gold):
        return False
    ends = forms.ends(gold)
    if ends and not forms.may_be_pair(found):
        return _is_point(gold, ends) and _is_bare_point(found, gold)
    bases = forms.base(found), forms.base(gold)
    if None not in bases and bases[0] != bases[1]:
        return False
    gold, _ = forms.estimate(gold)
    parts = [forms.estimate(part) for part in forms.members(found)]
    values = [exact for exact, _ in parts]
    if not all(values):
        return False
    return all(_is_sound(exact, rounded, gold) for exact, rounded in parts) and _same(values, gold)


def _is_point(gold: str, ends: list[str]) -> bool:
    """Return whether `(a,b)` can be no interval, because b is not greater than a."""
    first, last = map(_number, ends)
    return gold.startswith("(") and gold.endswith(")") and first is not None and last is not None and first >= last


def _is_bare_point(found: str, gold: str) -> bool:
    parts = forms.members(found)
    return len(parts) == 2 and "=" not in found and equal(f"({', '.join(parts)})", gold)


def _is_sound(exact: str, rounded: str | None, gold: str) -> bool:
    """Return whether the grammar derives all values of an answer, and its `\\approx` rounds the last of them."""
    first, *others = forms.sides(exact)
    lacks_first = not first and not exact.startswith("=")  # an answer may begin with `=`
    if lacks_first or not all(others):
        return False
    sides = [side for side in (first, *others) if side]
    is_equation = len(sides) > 1
    if not all(derives(side, gold) or (is_equation and is_name(side)) for side in sides):
        return False
    return rounded is None or _rounds(sides[-1], rounded)


def _same(parts: list[str], gold: str) -> bool:
    if len(parts) == 1:
        return _sides_equal(parts[0], gold) if len(forms.members(gold)) == 1 else _verified(parts[0], gold)
    is_equation = len(forms.members(gold)) == 1 and len(forms.sides(gold)) > 1
    is_list = not is_equation and _verified(", ".join(parts), gold)
    if not all(map(_is_consistent, parts)):
        return False
    return is_list or all(_sides_equal(part, gold) for part in parts)


def _is_consistent(part: str) -> bool:
    """Return whether all sides of an equation that are no names are equal."""
    values = [side for side in forms.sides(part) if side and not is_name(side)]
    return all(_verified(side, values[-1]) for side in values[:-1])


def _sides_equal(found: str, gold: str) -> bool:
    sides = [side for side in forms.sides(found) if side]
    gold_sides = forms.sides(gold)
    if len(gold_sides) == 2 and is_name(gold_sides[0]):
        value = gold_sides[1]
    elif len(gold_sides) > 1:  # an equation is no number
        return len(sides) == len(gold_sides) and _verified(found, gold)
    else:
        value = gold
    if len(sides) == 1:
        return _verified(sides[0], gold)
    values = [side for side in sides if not is_name(side)] or sides[-1:]
    if all(_verified(side, value) for side in values):
        return True
    return len(sides) == len(gold_sides) and gold_sides[0] in found and _verified(found, gold)


def _verified(answer: str, truth: str) -> bool:
    answer = formula_of(answer) or answer
    truth = formula_of(truth) or truth
    return verified(answer, truth) and nearly_equal(answer, truth)


def _rounds(exact: str, rounded: str) -> bool:
    """Return whether a decimal number is a value to its number of decimals, rounded or cut off."""
    number = forms.decimal(rounded)
    value = _number(exact)
    if number is None or value is None:
        return False
    exponent = number.as_tuple().exponent
    unit = 10.0 ** int(exponent)
    difference = abs(value) - abs(float(number))
    return (value < 0) == (number < 0) and (abs(difference) <= 0.5001 * unit or 0 <= difference < unit)


def _number(latex: str) -> float | None:
    """Return the real value of an expression; None if it has none."""
    with bounded():
        values = parsed(latex)
        try:
            return float(values[0])
        except (IndexError, TypeError, ValueError, ArithmeticError, NotImplementedError):
            return None
