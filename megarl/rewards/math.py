"""MATH: the answer in the last `\\boxed{...}` equals the ground truth, as math-verify reads both.

Sympy computes the expressions that math-verify reads, and a tower of powers may take any time and memory. Powers are
bounded in bits, and the rule in its CPU time; math-verify's own timers, which count the load of the machine, are off.
Sympy reads numerals, and math-verify reads arithmetic in plain text, with Python's `eval`. This module replaces both by
its own parser. `docs/rewards.md` lists the differences from math-verify's results.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from functools import cache, lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from megarl.errors import UserError
from megarl.platform.deadline import computing_at_most
from megarl.platform.patching import declare, replaced
from megarl.rewards import math_forms as forms
from megarl.rewards.arithmetic import Operations, read

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
MAX_CHARACTERS = 1000
"""Most characters of an answer that is compared, six times the longest of MATH: math-verify's time is superlinear."""

MAX_BITS = 100_000
"""Most bits of a power of integers; sympy refuses a larger power, and the answer is wrong."""
CPU_S = 1.0
"""Most seconds of CPU time for one response."""

_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BARE = re.compile(r"(?=[-+.(\[|\d\\]|[a-zA-Z](?![a-zA-Z]))([^$\n]*)")
_CLOSES_MATHEMATICS = re.compile(r"\\[)\]]")
_NEIGHBOURS = re.compile(r"[\s$]*(?:[,;&]|\band\b)(?:[\s$]|\band\b|\\(?:quad|text\{ *and *\}))*")
_SAID = re.compile(r"answer[*_]*(?:\s*[:：]| is\b)[\s*_:]*", re.IGNORECASE)
_NO_TRUTHS = ("", "nan", "none", "null")
_STRUCTURE = re.compile(r"\s*[\[({]\s*['\"]")
_NEUTRAL = re.compile(  # commands that change the looks of an expression, not its meaning
    r"(?<!\\)\\(?P<space>[!,;: ]|q?quad(?![a-zA-Z]))|\\(?:left|right|displaystyle)(?![a-zA-Z])"
    r"|\\[dtc](?P<frac>frac)(?![a-zA-Z])"
)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,\\!|\\,|\{,\})(?=[0-9]{3})")
_SPACE = re.compile(r"(?<![a-zA-Z0-9]) | (?![a-zA-Z0-9])")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Return 1.0 if the content of the last `\\boxed{...}` equals the ground truth, else 0.0.

    Neighbouring boxes are one list. A list as the ground truth holds the accepted answers.

    Raises:
        UserError: the ground truth cannot be read.
        TimeoutError: the comparison takes more than `CPU_S`.
    """
    return _score(last_boxed(solution_str), ground_truth)


def compute_score_dapo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Return 1.0 if the text after the last `Answer:` on its line equals the ground truth, else 0.0.

    If that text has a box, the box alone counts; in a response without `Answer:`, the last box counts. Raises as
    `compute_score` does.
    """
    return _score(said(solution_str), ground_truth)


def right_answer(ground_truth: Any) -> str:
    """Return a response that both rules score 1.0. Raises UserError if the ground truth cannot be read."""
    return f"Answer: \\boxed{{{' '.join(accepted(ground_truth)[0].split())}}}"


def reads_as_text(ground_truth: Any) -> bool:
    """Return whether math-verify reads no mathematics in the ground truth, so that only the same words equal it."""
    return all(_is_text(forms.plain(text)) for text in accepted(ground_truth))


def accepted(ground_truth: Any) -> list[str]:
    """Return the accepted answers. Raises UserError if there is none, or one that cannot be read."""
    values = list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]
    texts = [str(value) for value in values]
    for value, text in zip(values, texts, strict=True):
        if not isinstance(value, str | int | float | Decimal) or isinstance(value, bool):
            raise UserError(f"the ground truth {value!r} is neither a text nor a number")
        if forms.plain(text).strip(" {}").lower() in _NO_TRUTHS:
            raise UserError(f"the ground truth {value!r} is no answer")
        if _STRUCTURE.match(text):
            raise UserError(f"the ground truth {value!r} is the text of a list or a mapping: give a list of answers")
        if not _is_readable(text):
            raise UserError(f"the ground truth {value!r} is no complete LaTeX, or math-verify reads nothing in it")
    if not texts:
        raise UserError("the ground truth is a list without an answer")
    return texts


def answer_in(text: str) -> str:
    """Return the answer that is compared, without commands that only change its looks; '' if there is none."""
    return _plain(last_boxed(text) or "")


def answer_in_dapo(text: str) -> str:
    """Return the answer after `Answer:` like `answer_in`."""
    return _plain(said(text) or "")


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` that is closed and not empty, or None.

    Boxes before it with nothing but a comma or `and` between them are one list with it, without repetitions. Without
    braces, as in `$\\boxed 5$`, the content goes up to the end of the formula or the line. Takes linear time.
    """
    closings = _closings(text)
    found, first = list[str](), len(text)
    for box in reversed(list(_BOX.finditer(text))):
        content, end = _boxed(text, box, closings, first)
        if found and not (end <= first and _NEIGHBOURS.fullmatch(text, end, first)):
            break
        if content:
            found.append(content)
        first = box.start()
    return ", ".join(reversed(dict.fromkeys(found))) or None


def _boxed(text: str, box: re.Match[str], closings: Mapping[int, int], limit: int) -> tuple[str, int]:
    """Return the content of a box, and its end; '' if it is empty or not closed. A box without braces ends at limit."""
    if text.startswith("{", box.end()):
        closing = closings.get(box.end(), 0)
        return text[box.end() + 1 : closing].strip(), closing + 1
    bare = _BARE.match(text, box.end(), limit)
    if not bare:
        return "", box.end()
    return _CLOSES_MATHEMATICS.split(bare[1], maxsplit=1)[0].rstrip(" ."), bare.end()


def said(text: str) -> str | None:
    """Return the text after the last `Answer:` on its line; without `Answer:`, the last box."""
    marks = list(_SAID.finditer(text))
    if not marks:
        return last_boxed(text)
    line = text[marks[-1].end() :].partition("\n")[0]
    return last_boxed(line) or line.strip(" *$").rstrip(".").rstrip(" *$") or None


def equal(answer: str, truth: str) -> bool:
    """Return whether an answer in LaTeX is right: math-verify accepts it, and it says nothing else than the truth.

    Every side of an equation counts, except a name; words are compared by their letters, numbers in a base by both.
    """
    if len(answer) > MAX_CHARACTERS:
        return False
    found, gold = forms.plain(answer), forms.plain(truth)
    words, gold_words = forms.word(found), forms.word(gold)
    if words and gold_words:
        return words == gold_words
    if forms.connects(found) and not forms.connects(gold):
        return False
    if forms.base(found) and forms.base(gold) and forms.base(found) != forms.base(gold):
        return False
    parts = forms.members(found)
    if len(parts) == 1:
        return _sides_equal(parts[0], gold) if len(forms.members(gold)) == 1 else verified(found, gold)
    is_equation = len(forms.members(gold)) == 1 and len(forms.sides(gold)) > 1
    is_list = not is_equation and verified(found, gold)
    return all(map(_is_consistent, parts)) and (is_list or all(_sides_equal(part, gold) for part in parts))


def _is_consistent(part: str) -> bool:
    """Return whether all sides of an equation that are no names are equal."""
    values = [side for side in forms.sides(part) if not forms.is_name(side)]
    return all(verified(side, values[-1]) for side in values[:-1])


def _sides_equal(found: str, gold: str) -> bool:
    sides, gold_sides = forms.sides(found), forms.sides(gold)
    if len(gold_sides) == 2 and forms.is_name(gold_sides[0]):
        value = gold_sides[1]
    elif len(gold_sides) > 1:  # an equation is no number
        return len(sides) == len(gold_sides) and verified(found, gold)
    else:
        value = gold
    if len(sides) == 1:
        return verified(sides[0], gold)
    values = [side for side in sides if not forms.is_name(side)] or sides[-1:]
    return all(verified(side, value) for side in values) or (
        len(sides) == len(gold_sides) and gold_sides[0] in found and verified(found, gold)
    )


def verified(answer: str, truth: str) -> bool:
    """Return whether math-verify accepts an answer in LaTeX as equal to the truth. Its time is not bounded here."""
    load()
    with _bounded():
        gold, found = (_parsed(text) for text in (truth, answer))
        return bool(load().verify(gold, found, timeout_seconds=None))


def _parsed(text: str) -> Any:
    return load().parse(f"\\boxed{{{text}}}", parsing_timeout=None)


@lru_cache(maxsize=4096)
def _is_readable(truth: str) -> bool:
    """Return whether the braces of a truth are closed, and math-verify reads something in it."""
    depth = 0
    for token in _BRACES.finditer(truth):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth < 0:
            return False
    with _in_time(), _bounded():
        return depth == 0 and bool(_parsed(forms.plain(truth)))


def _is_text(truth: str) -> bool:
    if forms.word(truth) is not None:
        return False
    with _in_time(), _bounded():
        return forms.is_prose(truth) or all(isinstance(value, str) for value in _parsed(truth))


@cache
def load() -> ModuleType:
    """Import math-verify, which takes a second, and the modules that it imports at its first call."""
    import_module("sympy.physics.units")  # defines names by `parse_expr`, which `_bounded` replaces
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timers are off
    return import_module("math_verify")


def _score(answer: str | None, truth: Any) -> float:
    truths = accepted(truth)
    if answer is None:
        return 0.0
    with _in_time():
        return float(any(equal(answer, text) for text in truths))


def _closings(text: str) -> dict[int, int]:
    """Return the position of the closing brace by that of the opening brace, without `\\{` and `\\}`."""
    closings, opened = dict[int, int](), list[int]()
    for token in _BRACES.finditer(text):
        if token[0] == "{":
            opened.append(token.start())
        elif token[0] == "}" and opened:
            closings[opened.pop()] = token.start()
    return closings


def _plain(latex: str) -> str:
    latex = _THOUSANDS.sub("", latex).replace("~", " ")
    latex = _NEUTRAL.sub(lambda match: "\\frac" if match["frac"] else " " * bool(match["space"]), latex)
    return _SPACE.sub("", " ".join(latex.split())).rstrip(".")


@contextmanager
def _in_time() -> Iterator[None]:
    load()  # its imports are not the response's
    try:
        with computing_at_most(CPU_S):
            yield
    except TimeoutError as error:
        raise TimeoutError(f"the comparison needs more than {CPU_S:g} s of CPU time") from error


@contextmanager
def _bounded() -> Iterator[None]:
    """Make sympy and math-verify read plain text with `_term` instead of `parse_expr`, which calls `eval`.

    Sympy's other way from text to code, `lambdify`, writes the names of symbols into code, and names may be any text.
    It is disabled: sympy computes the same in another way, or not at all. Powers are bounded by `MAX_BITS`.
    """
    with ExitStack() as stack:
        for parser in PARSERS:
            stack.enter_context(replaced(parser, parse_expr=_term))
        for numbers in POWERS:
            stack.enter_context(replaced(numbers, _eval_power=_power_of(numbers.original("_eval_power"))))
        stack.enter_context(replaced(COMPILER, compile=_refuse, eval=_refuse, exec=_refuse))
        yield


def _power_of(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return sympy's method for powers with a bound on the bits of the result."""

    def power(base: Any, exponent: Any) -> Any:
        largest = max(abs(base.p), base.q)
        is_large = (
            exponent.is_Rational and largest > 1 and largest.bit_length() * abs(exponent.p) > MAX_BITS * exponent.q
        )
        if is_large:
            raise OverflowError("a power too large")
        return compute(base, exponent)

    return power


def _refuse(*arguments: Any, **options: Any) -> NoReturn:
    raise NotImplementedError("code made from a response is not run")


def _term(text: str, *arguments: Any, evaluate: bool | None = None, **options: Any) -> Any:
    """Return arithmetic as a term of sympy. Raises ValueError for anything else."""
    import sympy

    add, multiply, power = (partial(make, evaluate=evaluate is not False) for make in (sympy.Add, sympy.Mul, sympy.Pow))

    def minus(term: Any) -> Any:
        return -term if term.is_Number else multiply(-1, term)

    return read(
        text,
        Operations(
            number=lambda digits: sympy.Integer(int(digits)) if digits.isdigit() else sympy.Float(digits),
            unary={"+": lambda term: term, "-": minus},
            binary={
                "+": add,
                "-": lambda left, right: add(left, minus(right)),
                "*": multiply,
                "/": lambda left, right: multiply(left, power(right, -1)),
                "//": lambda left, right: left // right,
                "**": power,
            },
        ),
    )
