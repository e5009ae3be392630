"""MATH: the last `\\boxed{...}` of the response and the ground truth are the same mathematical object.

math-verify decides, reading both as LaTeX by a grammar, of which only numerals reach sympy's parser. Its other reader,
for plain expressions, gives that parser whole expressions, which ends in Python's `eval`; it is not used. An answer is
evaluated only in the vocabulary below and with small exponents, because computing `9^{9^{9}}` or a factorial cannot be
interrupted; any other answer counts where it is the ground truth letter by letter.
"""

import re
import threading
from collections.abc import Mapping
from math import prod
from typing import Any

MAX_CHARACTERS = 400
MAX_EXPONENT = 10_000
"""Bound on the product of all the numbers that stand in exponents."""
MAX_EXPONENT_OF_GROUP = 20
"""The same for exponents of what is in parentheses or braces, which may have to be multiplied out."""
MAX_DIGITS = 60
TIMEOUT_S = 5

_COMMAND = re.compile(
    "frac|dfrac|tfrac|sqrt|pi|theta|alpha|beta|cdot|times|div|pm|mp|infty|cup|cap|in|ln|log|sin|cos|tan|cot|sec|csc|"
    "arcsin|arccos|arctan|le|ge|leq|geq|lt|gt|ne|neq|left|right|text|mathrm|begin|end|circ|emptyset|mathbb"
)
_SCIENTIFIC = re.compile(r"[0-9.][eE][-+]?[0-9]")
_THOUSANDS = re.compile(r"(?<=[0-9]),\\!(?=[0-9]{3})")
_SPACES = re.compile(r"\\[!,;: ]|\\q?quad(?![a-zA-Z])|\s+|~")
_SHORTHAND = re.compile(r"\\([dt])frac(?![a-zA-Z])|\\(?:left|right)(?![a-zA-Z])")
_EXPONENT = re.compile(r"\^(\{[^{}^]*\}|\{-?\\[dt]?frac\{[0-9]+\}\{[0-9]+\}\}|[0-9a-zA-Z]|\\circ)(?!\^)")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """1.0 where the content of the last `\\boxed{...}` equals the ground truth, else 0.0."""
    answer = last_boxed(solution_str)
    return float(answer is not None and equal(answer, str(ground_truth)))


def answer_in(text: str) -> str:
    """The content that is compared, letter by letter: equal values may look different; '' where there is none."""
    return _letters(_tidy(last_boxed(text) or ""))


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` or `\\fbox{...}`, whose braces have to be closed."""
    start = max(text.rfind(opening) for opening in ("\\boxed{", "\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start)
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 1 : position].strip()
    return None


def equal(answer: str, truth: str) -> bool:
    """Whether two LaTeX expressions say the same."""
    if len(answer) > MAX_CHARACTERS:
        return False
    answer, truth = _tidy(answer), _tidy(truth)
    if _letters(answer) == _letters(truth):
        return True
    return cheap(answer) and cheap(truth) and _same_value(answer, truth)


def cheap(latex: str) -> bool:
    """Whether evaluating an expression takes a bounded time: no factorials, towers of powers or unknown commands."""
    text = latex.replace(" ", "")
    exponents = _EXPONENT.findall(text)
    if len(exponents) != text.count("^") or "!" in text or "**" in text or _SCIENTIFIC.search(text):
        return False
    known = all(_COMMAND.fullmatch(command) for command in re.findall(r"\\([a-zA-Z]+)", latex))
    if not known or re.search(rf"[0-9]{{{MAX_DIGITS}}}", text):
        return False
    of_groups = re.findall(r"(?<=[)}\]])" + _EXPONENT.pattern, text)
    return _product(exponents) <= MAX_EXPONENT and _product(of_groups) <= MAX_EXPONENT_OF_GROUP


def _product(exponents: list[str]) -> int:
    return prod(int(number) or 1 for part in exponents for number in re.findall("[0-9]+", part))


def _tidy(latex: str) -> str:
    return _SPACES.sub(" ", _THOUSANDS.sub("", latex)).strip().rstrip(".")


def _letters(latex: str) -> str:
    return _SHORTHAND.sub(lambda match: "\\frac" if match[1] else "", latex).replace(" ", "")


def _same_value(answer: str, truth: str) -> bool:
    # symbolic algebra takes a second to import, and only this reward needs it
    from math_verify import LatexExtractionConfig, parse, verify

    # its timer is a signal, which Python gives to the main thread alone
    seconds = TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    gold, found = (
        parse(
            f"\\boxed{{{text}}}",
            extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
            fallback_mode="no_fallback",
            parsing_timeout=seconds,
        )
        for text in (truth, answer)
    )
    return bool(gold and found) and bool(verify(gold, found, timeout_seconds=seconds))
