"""A right answer with one token more stays right only if the page of the rules derives it.

The tables and patterns here are read off `docs/rewards.md` by hand and use nothing of the rules.
"""

import re
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.rewards.built_in import RULES

HEDGES = re.split(
    r"\s+",
    """not no nope wrong false never maybe perhaps or isn't negative minus million M k K dozen half squared lakh
    about roughly except kidding vice versa otherwise if unless swapped reversed lies ignore and but so a the is
    of per each 0 1 5 00 .5 1. 5, e5 ^2 ^1 _6 / // /2 - -- + ++ = == != <= < > ~ ≈ ≠ ± ( ) [ ] { } {} () | ; : , .
    .. ... ! !! ? ' " ` * ** _ __ % %% ° $ $$ # @ & \\ ² ½ × ÷ − – — x i cm apples dollars percent kg m
    \\text{not} \\neg \\forall \\bar \\hat \\approx \\sim \\ne \\max \\lim \\cup \\cdot \\times \\pm \\frac \\sqrt
    \\ldots \\prime \\dagger \\to \\because \\left \\right \\binom \\emptyset""",
)
SIGN = st.characters(exclude_categories=("C", "Z", "L"))
TOKEN = st.sampled_from(HEDGES) | st.lists(SIGN, min_size=1, max_size=3).map("".join)
"""Words and signs, and any other signs and digits."""


GSM8K = re.compile(
    r"(?:[=+$€£¥₹]|\{\}|\(\)|0|\s)*18(?:\.0+)?\s*"
    r"(?:(?:\{\}|\(\)|cm|kg| m|apples|dollars|percent|each|[%°$€£¥₹¢Ω])(?:\{\}|\s)*)?[.,]?\s*"
)
JOIN = r"(?:(?:and|but|so)(?:\s*,)?\s+|&(?:\s*,)?\s*)?"
POINT = r"(?:[-*•]\s+|\(?[0-9]{1,3}[.)]\s*)?"
ROLES = re.compile(
    rf"\s*{JOIN}{POINT}(?:\|\s*)?Al is (?:a|the)? *knight(?:\s*\|)?\s*(?:[,.;!]\s*)?\s*{JOIN}{POINT}(?:\|\s*)?"
    r"Bo is (?:a|the)? *knave(?:\s*\|)?\s*[.!]?\s*"
)
MATH = re.compile(
    r"(?:[=+$]|\*\*|__|\{\}|\s|0)*42(?:\.0*)?\s*(?:\^1)?(?:(?:cm|kg|apples|dollars|percent|[%°$¢€£¥₹]|\$\$|\*\*|__)\s*)?[$\s]*[.,;}]*\s*"
)
SIGNS = str.maketrans("−–‒﹣－×∙⋅·∗÷∕", "-----*****//")


def plain(text: str) -> str:
    """Return an answer in ASCII, with one blank for each space."""
    text = unicodedata.normalize("NFKC", text.translate(SIGNS)).replace("{}", "")
    return " ".join(re.sub(r"\\([%$])", r"\1", re.sub(r"\\[,;:! ]", " ", text)).split())


def value(text: str) -> Any:
    """Return the value of an arithmetic expression; None for anything else."""
    if not re.fullmatch(r"[-+*/(). 0-9]+", text):
        return None
    try:
        return eval(text)  # noqa: S307 - digits and operators, of this test
    except (SyntaxError, ArithmeticError, TypeError):
        return None


def is_equation(text: str) -> bool:
    *sides, last = plain(text).split("=")
    number = re.fullmatch(r"\s*\+?\s*\$?0*56(?:\.0*)?[.,]?\s*", last)
    return bool(number) and all(value(side.strip()) == 56 for side in sides if side.strip())


def is_solution(text: str) -> bool:
    numbers = sorted(map(int, re.findall("[0-9]+", plain(text))))
    return value(plain(text).strip()) == 23 and numbers == [2, 3, 7]


def is_value(text: str) -> bool:
    """Return whether arithmetic has the value 42; 4200 % are 42."""
    number, percent, rest = plain(text).partition("%")
    found = value(number.strip())
    return not rest.strip(" .,") and found is not None and found == (4200 if percent else 42)


RIGHT: dict[str, tuple[str, str, Any, Callable[[str], bool]]] = {
    "gsm8k": ("#### {}", "18", "18", lambda text: bool(GSM8K.fullmatch(plain(text)))),
    "multiply": ("<answer>{}</answer>", "7*8 = 56", 56, is_equation),
    "countdown": ("<answer>{}</answer>", "3*7+2", {"target": 23, "numbers": [3, 7, 2]}, is_solution),
    "knights_knaves": (
        "<answer>{}</answer>",
        "Al is a knight, Bo is a knave",
        {"names": ["Al", "Bo"], "is_knight": [True, False]},
        lambda text: bool(ROLES.fullmatch(plain(text))),
    ),
    "math": ("\\boxed{{{}}}", "42", "42", lambda text: bool(MATH.fullmatch(plain(text))) or is_value(text)),
}
"""A form of a response, its right answer, the ground truth, and whether the page derives another answer."""


@pytest.mark.parametrize("rule", RIGHT)
@settings(max_examples=400)
@example(token="''", place=0, before="", after=" ")
@example(token="00%", place=2, before="", after="")
@example(token="%$", place=2, before="", after="")
@given(token=TOKEN, place=st.integers(0, 40), before=st.sampled_from(["", " "]), after=st.sampled_from(["", " "]))
def test_inserted_token_keeps_score_only_as_page_allows(
    rule: str, token: str, place: int, before: str, after: str
) -> None:
    form, right, truth, derives = RIGHT[rule]
    place = min(place, len(right))
    answer = right[:place] + before + token + after + right[place:]
    assert RULES[rule].score(rule, form.format(right), truth, {}) == 1.0
    try:
        score = RULES[rule].score(rule, form.format(answer), truth, {})
    except TimeoutError:
        return
    assert score < 1.0 or derives(answer), answer


@pytest.mark.parametrize("rule", RIGHT)
def test_every_token_is_tried_at_every_place(rule: str) -> None:
    form, right, truth, derives = RIGHT[rule]
    paid = set[str]()
    for token in HEDGES:
        for place in range(len(right) + 1):
            for glued in (token, f" {token}", f"{token} ", f" {token} "):
                answer = right[:place] + glued + right[place:]
                if "!!" not in token and RULES[rule].score(rule, form.format(answer), truth, {}) == 1.0:
                    paid.add(answer)
    assert {answer for answer in paid if not derives(answer)} == set()
    assert len(paid) >= 8
