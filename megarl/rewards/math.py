"""MATH: the answer in the last `\\boxed{...}` equals the ground truth, as math-verify reads both.

Sympy computes the expressions that math-verify reads, and a tower of powers may take any time and memory. The process
that calls this rule bounds both (`megarl.rewards.keeper`), so math-verify's own timers, which are signals, are off.
Sympy reads numerals, and math-verify reads arithmetic in plain text, with Python's `eval`. This module replaces both by
its own parser. `docs/rewards.md` lists the differences from math-verify's results.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from megarl.platform.patching import declare, replaced
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
MAX_CHARACTERS = 1000
"""Most characters of an answer that is compared, six times the longest of MATH: math-verify's time is superlinear."""

_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BARE = re.compile(r"(?=[-+.(\[|\d\\]|[a-zA-Z](?![a-zA-Z]))([^$\n]*)")
_CLOSES_MATHEMATICS = re.compile(r"\\[)\]]")
_SAID = re.compile(r"answer\s*:[\s*]*([^\n]+)", re.IGNORECASE)
_NEUTRAL = re.compile(  # commands that change the looks of an expression, not its meaning
    r"(?<!\\)\\(?P<space>[!,;: ]|q?quad(?![a-zA-Z]))|\\(?:left|right|displaystyle)(?![a-zA-Z])"
    r"|\\[dtc](?P<frac>frac)(?![a-zA-Z])"
)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,\\!|\\,|\{,\})(?=[0-9]{3})")
_SPACE = re.compile(r"(?<![a-zA-Z0-9]) | (?![a-zA-Z0-9])")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Return 1.0 if the content of the last `\\boxed{...}` equals the ground truth, else 0.0."""
    return _score(last_boxed(solution_str), ground_truth)


def compute_score_dapo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Return 1.0 if the text after the last `Answer:` on its line equals the ground truth, else 0.0.

    If that text has a box, the box alone counts; in a response without `Answer:`, the last box counts.
    """
    return _score(said(solution_str), ground_truth)


def answer_in(text: str) -> str:
    """Return the answer that is compared, without commands that only change its looks; '' if there is none."""
    return _plain(last_boxed(text) or "")


def answer_in_dapo(text: str) -> str:
    """Return the answer after `Answer:` like `answer_in`."""
    return _plain(said(text) or "")


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` that is closed and not empty, or None.

    Without braces, as in `$\\boxed 5$`, the content goes up to the end of the formula or the line. Takes linear time.
    """
    closings = _closings(text)
    end = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        if text.startswith("{", box.end()):
            found = text[box.end() + 1 : closings.get(box.end(), 0)]
        else:
            bare = _BARE.match(text, box.end(), end)
            found = _CLOSES_MATHEMATICS.split(bare[1], maxsplit=1)[0].rstrip(" .") if bare else ""
        if found.strip():
            return found.strip()
        end = box.start()
    return None


def said(text: str) -> str | None:
    """Return the text after the last `Answer:` on its line; without `Answer:`, the last box."""
    lines = _SAID.findall(text)
    if not lines:
        return last_boxed(text)
    return last_boxed(lines[-1]) or lines[-1].strip(" *$").rstrip(".").rstrip(" *$")


def equal(answer: str, truth: str) -> bool:
    """Return whether math-verify accepts an answer in LaTeX as equal to the truth. Its time is not bounded here."""
    if len(answer) > MAX_CHARACTERS:
        return False
    library = load()
    with _no_eval():
        gold, found = (library.parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
        return bool(library.verify(gold, found, timeout_seconds=None))


@cache
def load() -> ModuleType:
    """Import math-verify, which takes a second, and the modules that it imports at its first call."""
    import_module("sympy.physics.units")  # defines names by `parse_expr`, which `_no_eval` replaces
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timers are off
    return import_module("math_verify")


def _score(answer: str | None, truth: Any) -> float:
    return float(answer is not None and equal(answer, str(truth)))


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
def _no_eval() -> Iterator[None]:
    """Make sympy and math-verify read plain text with `_term` instead of `parse_expr`, which calls `eval`.

    Sympy's other way from text to code, `lambdify`, writes the names of symbols into code, and names may be any text.
    It is disabled: sympy computes the same in another way, or not at all.
    """
    with ExitStack() as stack:
        for parser in PARSERS:
            stack.enter_context(replaced(parser, parse_expr=_term))
        stack.enter_context(replaced(COMPILER, compile=_refuse, eval=_refuse, exec=_refuse))
        yield


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
