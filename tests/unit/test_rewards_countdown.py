"""Countdown: the scores of the reference trainer, from a parser that runs no code of a response and is never slow."""

import re
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rewards.arithmetic import MAX_CHARACTERS, MAX_DEPTH
from megarl.rewards.built_in import RULES
from megarl.rewards.countdown import CORRECT, WELL_FORMED, compute_score, compute_score_bare, evaluate

TRUTH = {"target": 23, "numbers": [2, 3, 7]}


def score(response: str, truth: dict[str, Any] = TRUTH) -> float:
    return compute_score("countdown", response, truth, {})


def bare(response: str, truth: dict[str, Any] = TRUTH) -> float:
    return compute_score_bare("countdown/bare", response, truth, {})


@pytest.mark.parametrize(
    ("response", "expected", "expected_bare"),
    [
        ("<answer>3*7+2</answer>", 1.0, 1.0),
        ("<think>7*3 is 21</think>\n<answer> 7 * 3 + 2 </answer>", 1.0, 1.0),
        ("<think>I use <answer> tags</think>\n<answer>(7*3)+2</answer>", 1.0, 1.0),
        ("<think>I use <answer> tags</think><answer>(7*3)+2</answer>", 0.1, 1.0),
        ("<answer>1+1</answer> no, <answer>(2)+3*7</answer> is right", 1.0, 1.0),
        ("<answer>3*7+2</answer>\n", 0.0, 1.0),
        ("<answer>3*7+2</answer>\nThat is it.", 0.0, 1.0),
        ("<answer>\n3*7+2\n</answer>", 0.0, 1.0),
        ("<answer>3*7+2 = 23</answer>", 0.1, 0.1),
        ("<answer>the answer is 23</answer>", 0.1, 0.1),
        ("<answer></answer>", 0.1, 0.1),
        ("<answer>3*7-2</answer>", 0.1, 0.1),
        ("<answer>7+7+7+2</answer>", 0.1, 0.1),
        ("<answer>3*7+2+0</answer>", 0.1, 0.1),
        ("<answer>2+21</answer>", 0.1, 0.1),
        ("<answer>23</answer>", 0.1, 0.1),
        ("<answer>+3*7--2</answer>", 1.0, 1.0),
        ("<answer>3.*7.+2</answer>", 1.0, 1.0),
        ("<answer>03*7+2</answer>", 0.1, 0.1),
        ("<answer>3*7+2", 0.0, 0.0),
        ("3*7+2</answer>", 0.0, 0.0),
        ("Let me see.\nThree sevens and two:\n(7*3)+2\n\n", 0.0, 1.0),
        ("3*7+2", 0.0, 1.0),
        ("-(-2-3*7)", 0.0, 1.0),
        ("3*7-2", 0.0, 0.1),
        ("3*7+2 = 23", 0.0, 0.0),
        ("3 7 2", 0.0, 0.0),
        ("(3*7+2", 0.0, 0.0),
        ("I think", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_scores_by_hand(response: str, expected: float, expected_bare: float) -> None:
    assert (score(response), bare(response)) == (expected, expected_bare)


def test_countdown_operators_and_floats_behave_as_in_python() -> None:
    assert score("<answer>2**3</answer>", {"target": 8, "numbers": [2, 3]}) == CORRECT
    assert score("<answer>7//2</answer>", {"target": 3, "numbers": [2, 7]}) == CORRECT
    assert score("<answer>8/(3-8/3)</answer>", {"target": 24, "numbers": [3, 3, 8, 8]}) == CORRECT  # 23.999999999999986
    assert score("<answer>1/99999</answer>", {"target": 0, "numbers": [1, 99999]}) == WELL_FORMED


def by_eval(line: str, truth: dict[str, Any]) -> float:
    """Score by the reference trainer's rule from its description, with Python's `eval`, but without decimals."""
    tagged = re.findall("<answer>(.*?)</answer>", line)
    if not tagged:
        return 0.0
    expression = tagged[-1].strip()
    if sorted(int(digits) for digits in re.findall(r"\d+", expression)) != sorted(truth["numbers"]):
        return 0.1
    try:
        if not re.fullmatch(r"[\d+\-*/().\s]+", expression) or re.search(r"\.[0-9]", expression):
            return 0.1
        return 1.0 if abs(eval(expression, {"__builtins__": None}, {}) - truth["target"]) < 1e-5 else 0.1
    except Exception:
        return 0.1


TOKENS = [
    "1",
    "2",
    "3",
    "0",
    "7",
    "05",
    "3.",
    ".5",
    "+",
    "-",
    "*",
    "/",
    "//",
    "**",
    "(",
    ")",
    ".",
    " ",
    "\t",
    "\r",
    "\u0663",
]
SMALL_POWERS = re.compile(r"\*\*.*\*\*|\*\*[^*]*[0-9]{4}")  # eval computes these in time


@settings(max_examples=3000)
@given(st.lists(st.sampled_from(TOKENS), max_size=10).map("".join).filter(lambda text: not SMALL_POWERS.search(text)))
def test_expressions_score_as_by_eval(expression: str) -> None:
    numbers = [int(digits) for digits in re.findall(r"\d+", expression)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # 3(4) may be meant as a product
        try:
            target = eval(expression.strip(), {"__builtins__": None}, {})
        except Exception:
            target = 5
        truth = {"target": target if isinstance(target, int | float) else 5, "numbers": numbers or [1]}
        response = f"<answer>{expression}</answer>"
        assert score(response, truth) == by_eval(response, truth)


@given(
    st.lists(st.sampled_from(["<answer>", "</answer>", "3*7+2", "2", "\n", " ", "<answer>3*7+2</answer>"]), max_size=9)
)
def test_responses_score_as_by_eval(pieces: list[str]) -> None:
    response = "".join(pieces)
    assert score(response) == by_eval(response.split("\n")[-1], TRUTH)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "(" * 2 * MAX_DEPTH + "1" + ")" * 2 * MAX_DEPTH,
        "-" * 2 * MAX_DEPTH + "1",
        "1+" * MAX_CHARACTERS + "1",
        "9**9**9",
        "9**(9**9)",
        "(9**9999)**9999",
        "1/(3-3)",
        "0**-1",
        "²",
        "1e9",
        "0x10",
        "()",
        "...",
        "3(4)",
        ")",
        "",
    ],
)
def test_non_numbers_and_unbounded_expressions_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        evaluate(text)
    assert score(f"<answer>{text}</answer>") == WELL_FORMED


@given(st.text(alphabet="0123456789+-*/() \n<answer>.", max_size=400))
def test_any_text_has_one_of_three_scores(text: str) -> None:
    assert score(text) in (0.0, WELL_FORMED, CORRECT)
    assert bare(text) in (0.0, WELL_FORMED, CORRECT)


def test_both_are_registered() -> None:
    assert RULES["countdown"].score is compute_score
    assert RULES["countdown/bare"].score is compute_score_bare
