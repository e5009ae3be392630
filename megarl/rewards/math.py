"""MATH: the answer in the last `\\boxed{...}` equals the ground truth, as math-verify reads both.

An answer holds nothing else than the grammar of `math_grammar` derives. `docs/rewards.md` lists the differences from
math-verify's results.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from functools import lru_cache

from megarl.platform.deadline import computing_at_most
from megarl.platform.errors import UserError
from megarl.rewards import math_forms as forms
from megarl.rewards.math_equal import equal
from megarl.rewards.math_grammar import foreign_part
from megarl.rewards.math_terms import bounded, load, parsed, verified

CPU_S = 1.0
"""Most seconds of CPU time for one response."""

_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BARE = re.compile(r"(?=[-+.(\[|\d\\]|[a-zA-Z](?![a-zA-Z]))([^$\n]*)")
_CLOSES_MATHEMATICS = re.compile(r"\\[)\]]")
_NEIGHBOURS = re.compile(r"[\s$]*(?:[,;&]|\band\b)(?:[\s$]|\band\b|\\(?:quad|text\{ *and *\}))*")
_STATED = re.compile(r"answer[*_]*+(?: is[*_]*+)?\s*+[:：][\s*_:]*+", re.IGNORECASE)  # a repeat never gives back
_IN_WORDS = re.compile(r"answer[*_]*+ is\b[\s*_]*+", re.IGNORECASE)
_DISPLAY = re.compile(r"\\\[(?:(?!\\\]).)*+\\\][^\n]*|\$\$[^$]*+\$\$[^\n]*", re.DOTALL)
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_NO_TRUTHS = ("", "nan", "none", "null")
_STRUCTURE = re.compile(r"\s*[\[({]\s*['\"]")
_NEUTRAL = re.compile(  # commands that change the looks of an expression, not its meaning
    r"(?<!\\)\\(?P<space>[!,;: ]|q?quad(?![a-zA-Z]))|\\(?:left|right|displaystyle)(?![a-zA-Z])"
    r"|\\[dtc](?P<frac>frac)(?![a-zA-Z])"
)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,\\!|\\,|\{,\})(?=[0-9]{3})")
_SPACE = re.compile(r"(?<![a-zA-Z0-9]) | (?![a-zA-Z0-9])")


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None
) -> float:
    """Return 1.0 if the content of the last `\\boxed{...}` equals the ground truth, else 0.0.

    Neighbouring boxes are one list. A list as the ground truth holds the accepted answers.

    Raises:
        UserError: the ground truth cannot be read.
        TimeoutError: the comparison takes more than `CPU_S`.
    """
    return _score(last_boxed(solution_str), ground_truth)


def compute_score_dapo(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None
) -> float:
    """Return 1.0 if the text after the last `Answer:` on its line equals the ground truth, else 0.0.

    If that text has a box, the box alone counts; in a response without `Answer:`, the last box counts. Raises as
    `compute_score` does.
    """
    return _score(stated_answer(solution_str), ground_truth)


def right_answer(ground_truth: object) -> str:
    """Return a response that both rules score 1.0. Raises UserError if the ground truth cannot be read."""
    return f"Answer: \\boxed{{{' '.join(accepted(ground_truth)[0].split())}}}"


def reads_as_text(ground_truth: object) -> bool:
    """Return whether math-verify reads no mathematics in the ground truth, so that only the same words equal it."""
    return all(_is_text(forms.plain(text)) for text in accepted(ground_truth))


def accepted(ground_truth: object) -> list[str]:
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
        part = _foreign_part(text)
        if part:
            raise UserError(
                f"no usual answer equals the ground truth {value!r}, because of {part}: give the answer alone"
            )
    if not texts:
        raise UserError("the ground truth is a list without an answer")
    return texts


def answer_in(text: str) -> str:
    """Return the answer that is compared, without commands that only change its looks; '' if there is none."""
    return _plain(last_boxed(text) or "")


def answer_in_dapo(text: str) -> str:
    """Return the answer after `Answer:` like `answer_in`."""
    return _plain(stated_answer(text) or "")


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` that is closed and not empty, or None.

    Boxes before it with nothing but a comma or `and` between them are one list with it, without repetitions. Without
    braces, as in `$\\boxed 5$`, the content goes up to the end of the formula or the line. Takes linear time.
    """
    closings = _closings(text)
    found = list[str]()
    first = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        content, end = _boxed(text, box, closings, first)
        if found and (end > first or not _NEIGHBOURS.fullmatch(text, end, first)):
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


def stated_answer(text: str) -> str | None:
    """Return the text after the last `Answer:` on its line, else after the last `answer is`; else the last box."""
    marks = list(_STATED.finditer(text)) or list(_IN_WORDS.finditer(text))
    if not marks:
        return last_boxed(text)
    display = _DISPLAY.match(text, marks[-1].end())  # a formula of its own may have several lines
    line = display[0] if display else text[marks[-1].end() :].partition("\n")[0]
    return last_boxed(line) or line.strip(" *$").rstrip(".").rstrip(" *$") or None


@lru_cache(maxsize=4096)
def _is_readable(truth: str) -> bool:
    """Return whether the braces of a truth are closed, and math-verify reads something in it."""
    depth = 0
    for token in _BRACES.finditer(truth):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth < 0:
            return False
    with _in_time(), bounded():
        return depth == 0 and bool(parsed(forms.plain(truth)))


@lru_cache(maxsize=4096)
def _foreign_part(truth: str) -> str | None:
    """Return the part of a truth that no usual answer has; None if there is none, or if its only number equals it."""
    plain = forms.plain(truth)
    if forms.letters(plain):
        return None
    if "\n" in truth.strip() and "\\begin" not in truth:
        return "a line break"
    sides = [side for member in forms.members(plain) for side in forms.sides(member)]
    part = foreign_part(plain) if all(sides) else "an empty side of an equation"
    numbers = _NUMBER.findall(plain)
    if part and len(numbers) == 1:
        with _in_time():
            return None if verified(numbers[0], plain) else part
    return part


def _is_text(truth: str) -> bool:
    if forms.letters(truth) is not None:
        return False
    with _in_time(), bounded():
        return forms.is_prose(truth) or all(isinstance(value, str) for value in parsed(truth))


def _score(answer: str | None, truth: object) -> float:
    truths = accepted(truth)
    if answer is None:
        return 0.0
    with _in_time():
        return float(any(equal(answer, text) for text in truths))


def _closings(text: str) -> dict[int, int]:
    """Return the position of the closing brace by that of the opening brace, without `\\{` and `\\}`."""
    closings = dict[int, int]()
    opened = list[int]()
    for token in _BRACES.finditer(text):
        if token[0] == "{":
            opened.append(token.start())
        elif token[0] == "}" and opened:
            closings[opened.pop()] = token.start()
    return closings


def _plain(latex: str) -> str:
    latex = _THOUSANDS.sub("", latex).replace("~", " ")
    latex = _NEUTRAL.sub(_meaning, latex)
    return _SPACE.sub("", " ".join(latex.split())).rstrip(".")


def _meaning(command: re.Match[str]) -> str:
    if command["frac"]:
        return "\\frac"
    return " " if command["space"] else ""


@contextmanager
def _in_time() -> Iterator[None]:
    load()  # its imports are not the response's
    try:
        with computing_at_most(CPU_S):
            yield
    except TimeoutError as error:
        raise TimeoutError(f"the comparison needs more than {CPU_S:g} s of CPU time") from error
