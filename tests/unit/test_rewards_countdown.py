"""Countdown: exact arithmetic, every number once, and nothing a model can write is ever run or slow."""

import ast
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards import REWARDS
from megarl.rewards.countdown import CORRECT, MAX_CHARACTERS, WELL_FORMED, compute_score, evaluate

TRUTH = {"target": 23, "numbers": [2, 3, 7]}


def score(response: str) -> float:
    return compute_score("countdown", response, TRUTH, {})


@pytest.mark.parametrize(
    "response",
    [
        "3*7+2",
        " 2 + (7 * 3) ",
        "Let me see.\nThree sevens and two:\n(7*3)+2\n\n",
        "<think>7*3 is 21</think>\n<answer>7 * 3 + 2</answer>",
        "<answer>1+1</answer> no, <answer>\n(2)+3*7\n</answer> is right",
        "-(-2-3*7)",
    ],
)
def test_solutions(response: str) -> None:
    assert score(response) == CORRECT


@pytest.mark.parametrize(
    "response",
    [
        "3*7-2",  # another value
        "23",  # the target itself is not given
        "3*7+1+1",
        "7+7+7+2",  # a number twice
        "3*7+2+0",
        "2+21",
        "<answer>3*7+2 = 23</answer>",  # tagged: an attempt, though not an expression
        "<answer>the answer is 23</answer>",
        "3*7+2\n<answer>2</answer>",
    ],
)
def test_attempts(response: str) -> None:
    assert score(response) == WELL_FORMED


@pytest.mark.parametrize(
    "response", ["", "   \n", "I think", "3*7+2 = 23", "3*7+", "3**2", "7//3", "2.3", "3 7 2", "(3*7+2"]
)
def test_neither(response: str) -> None:
    assert score(response) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "9" * 13,
        "(" * 20 + "1" + ")" * 20,
        "-" * 30 + "1",
        "1+" * MAX_CHARACTERS + "1",
        "1/(3-3)",
        "²",
        "1e9",
        "0x10",
        "()",
        ")",
        "",
    ],
)
def test_what_is_not_arithmetic_or_not_bounded_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        evaluate(text)


def test_division_is_exact() -> None:
    assert compute_score("countdown", "8/(3-8/3)", {"target": 24, "numbers": [3, 3, 8, 8]}, None) == CORRECT
    assert evaluate("1/3")[0] == Fraction(1, 3)


EXPRESSIONS = st.recursive(
    st.integers(0, 50).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({parts[0]} {parts[1]}{parts[2]})"),
        st.tuples(inner, st.sampled_from("+-*"), inner).map("".join),
    ),
    max_leaves=8,
)


def exact(node: ast.expr) -> Fraction:
    """The brute-force twin: Python's own grammar, in fractions."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)  # type: ignore[arg-type]
    assert isinstance(node, ast.BinOp)
    left, right = exact(node.left), exact(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    return left * right if isinstance(node.op, ast.Mult) else left / right


@given(EXPRESSIONS)
def test_values_are_those_of_python_in_fractions(text: str) -> None:
    try:
        expected = exact(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="zero"):
            evaluate(text)
        return
    value, numbers = evaluate(text)
    assert value == expected
    assert numbers == [int(number) for number in re.findall("[0-9]+", text)]


@given(st.text(alphabet="0123456789+-*/() \n<answer>.", max_size=400))
def test_any_text_has_one_of_three_scores(text: str) -> None:
    assert score(text) in (0.0, WELL_FORMED, CORRECT)


def test_it_is_registered() -> None:
    assert REWARDS["countdown"] is compute_score
