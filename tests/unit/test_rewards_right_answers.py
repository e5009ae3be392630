"""A ground truth is right against itself, or the rule refuses it for every response: it is never an honest zero."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rewards.built_in import RULES, rule_of
from megarl.rewards.math import reads_as_text
from megarl.rewards.self_test import AS_TEXT, try_truth

READ: dict[str, list[Any]] = {
    "gsm8k": ["18", 18, "1,018", "-5", "3.50", 0.5, " 7 ", "$12", "1 000", "42."],
    "multiply": [56, "56", 56.0, "56.0", "1,056", "-7", 10**30, 10**300, "7" * 399],
    "countdown": [
        {"target": 24, "numbers": [3, 3, 8, 8]},
        {"target": "13", "numbers": [6.0, 5, 2]},
        {"target": 0, "numbers": [4, 4]},
        {"target": 5, "numbers": [5]},
        {"target": 99, "numbers": [1, 2, 3, 4, 5, 6]},
    ],
    "knights_knaves": [
        {"names": ["Zoey", "Oliver"], "is_knight": [True, False]},
        {"names": ["Mary Ann", "O'Neil", "Anne-Marie"], "is_knight": [False, False, True]},
        {"names": ["X1", "José"], "is_knight": [1, 0]},
        {"names": ["A", "B"], "is_knight": [True, False]},
        {"names": ["Person A", "The", "An"], "is_knight": [True, False, False]},
        {"names": ["Ann and Bob"], "is_knight": [True]},
        {"names": ["So Young", "And", "Answer", "Name"], "is_knight": [False, True, True, False]},
    ],
    "math": ["12", 12, 0.5, "42.", "$12.$", "**12**", r"\frac{1}{2}", r"\text{Monday}", "evil", "(1,2)", "[1,2)", "x=5"]
    + [
        "x^2+y^2=1",
        "1,2",
        ["12", "13"],
        (r"\frac12", "0.5"),
        "1010_2",
        r"\emptyset",
        r"\begin{pmatrix}1\\2\end{pmatrix}",
    ]
    + [r"30^\circ", r"12.5\%", r"\{1,2\}", "no solution", "ABC", "True", r"\boxed{5}", "½", "10\\,000", "-7"]
    + [
        "June 20",
        r"\text{October 30}",
        "3:4",
        "a:b",
        r"8\!:\!34 \text{ p.m.}",
        "9 hours",
        "3 apples",
        "12 or 13",
        "AB=5",
    ]
    + [r"x\in[1,2]", r"7 \text{ distinct integers}", "LQSX", "xy", r"\approx 8.24 \text{ mph}", r"\text{A, D, F}"],
}
UNREAD: dict[str, list[Any]] = {
    "gsm8k": ["", " ", "18 dollars", "1/2", "50%", "nan", "None", None, True, [18], {"a": 1}, float("nan"), "1,8", "x"],
    "multiply": ["", 56.7, "56.7", True, None, "nan", "seven", [56], float("inf"), 10**400, "1" + "0" * 400],
    "countdown": [
        None,
        "5",
        {},
        {"target": 5},
        {"target": 5, "numbers": []},
        {"target": 5, "numbers": ["two"]},
        {"target": "five", "numbers": [2, 3]},
        {"target": None, "numbers": [2, 3]},
        {"target": 5, "numbers": [2.5, 2.5]},
        {"target": 5, "numbers": [-2, 7]},
        {"target": float("nan"), "numbers": [2, 3]},
        {"goal": 5, "numbers": [2, 3]},
        {"target": 10, "numbers": "46"},
        {"target": 10, "numbers": {4: 1, 6: 1}},
        {"target": 4, "numbers": 4},
        {"target": 10**350, "numbers": [4]},
        {"target": 10**400, "numbers": [4]},
    ],
    "knights_knaves": [
        None,
        {"names": [], "is_knight": []},
        {"names": ["Zoey"], "is_knight": ["False"]},
        {"names": ["Zoey"], "is_knight": [True, False]},
        {"names": ["Dr. Smith", "Bob"], "is_knight": [True, False]},
        {"names": ["Bob", "bob"], "is_knight": [True, False]},
        {"names": [7], "is_knight": [True]},
        {"names": [""], "is_knight": [True]},
        {"names": "AB", "is_knight": [True, False]},
        {"names": {"A": 1, "B": 2}, "is_knight": [True, False]},
        {"names": ["A", "B"], "is_knight": {True: 1, False: 2}},
    ],
    "math": ["", "   ", r"\boxed{}", "{}", r"\frac{1}{", "}{", '{"a": 1}', "['1', '2']", "NaN", "None", "null"]
    + [None, True, [], ["12", ""], {"a": 1}, float("nan")]
    + ["Answer: 12", "x: 12", "12\n13", "12 (twelve)", ["12", "x="], "x=", "The answer is 12", "12, because", "12?"]
    + ["approximately 12", r"\text{Answer: 12}", "yes, 12", r"\boxed{12} is it", "<answer>12</answer>"],
}
SAME = {"gsm8k/flexible": "gsm8k", "svamp": "gsm8k", "math_dapo": "math", "countdown/bare": "countdown"}
TRUTHS = [(rule, truth) for rule in (*READ, *SAME) for truth in READ[SAME.get(rule, rule)]]
NO_TRUTHS = [(rule, truth) for rule in (*UNREAD, *SAME) for truth in UNREAD[SAME.get(rule, rule)]]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats() | st.text(max_size=8) | st.sampled_from(["18", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["target", "numbers", "names", "is_knight"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(("rule", "truth"), TRUTHS)
def test_ground_truth_scores_right_and_non_answer_zero(rule: str, truth: Any) -> None:
    result = try_truth(data_source=rule, ground_truth=truth, extra_info={})
    assert result["score"] == 1.0
    assert not result.get(AS_TEXT)
    assert RULES[rule].score(rule, "I do not know.", truth, {}) == 0.0


@pytest.mark.parametrize(("rule", "truth"), NO_TRUTHS)
@pytest.mark.parametrize("response", ["", "#### 5", "<answer>5</answer>", r"\boxed{nan}", "Answer: None"])
def test_unreadable_ground_truth_fails_for_every_response(rule: str, truth: Any, response: str) -> None:
    with pytest.raises(ValueError):
        RULES[rule].score(rule, response, truth, {})
    with pytest.raises(ValueError):
        RULES[rule].right_answer(truth)


@settings(max_examples=300)
@given(rule=st.sampled_from(["gsm8k", "multiply", "countdown", "knights_knaves"]), truth=ANYTHING)
def test_any_value_is_right_against_itself_or_refused(rule: str, truth: Any) -> None:
    try:
        right = RULES[rule].right_answer(truth)
    except ValueError:
        return
    assert right is None or RULES[rule].score(rule, right, truth, {}) == 1.0


def test_countdown_without_solution_has_no_right_answer() -> None:
    with pytest.raises(ValueError, match=r"no expression of the numbers \[1, 1\] is 7"):
        RULES["countdown"].right_answer({"target": 7, "numbers": [1, 1]})


def test_truths_that_are_only_words_are_noticed() -> None:
    assert reads_as_text("~12")
    assert not any(reads_as_text(text) for text in ("12", "evil", "no solution", r"\text{Monday}", "x+y", "3 apples"))


def test_any_of_several_accepted_answers_is_right() -> None:
    math = RULES["math"].score
    assert [math("math", rf"\boxed{{{text}}}", ["12", "13"], {}) for text in ("12", "13", "14", "12,13")] == [
        1,
        1,
        0,
        0,
    ]


def test_every_rule_has_a_right_answer() -> None:
    assert {rule.answer for rule in RULES.values() if rule.answer} == {RULES[name].answer for name in (*READ, *SAME)}
    rule = rule_of("reasoning_gym/chain_sum")
    assert rule is not None and rule.right_answer("5") == "<answer>5</answer>"
    assert rule_of("lighteval/MATH") is RULES["math"]
