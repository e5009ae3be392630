"""The answer that a rule extracts: equal texts for equal answers, so that majorities can be counted."""

import pytest

from megarl.rewards.built_in import RULES, extracts_answers, name_of_rule, rule_of

GROUND_TRUTHS = {
    "countdown": {"target": 8, "numbers": [3, 5]},
    "countdown/bare": {"target": 8, "numbers": [3, 5]},
    "knights_knaves": {"names": ["Ann", "Bob"], "is_knight": [True, False]},
}


@pytest.mark.parametrize(
    ("source", "response", "answer"),
    [
        ("gsm8k", "6 + 12\n#### $1,018.50 apples", "1018.5"),
        ("gsm8k", "#### 3 no, #### 18.00", "18"),
        ("gsm8k", "#### -100", "-100"),
        ("gsm8k", "it is 18", ""),
        ("gsm8k/flexible", "it is 18", "18"),
        ("gsm8k/flexible", "none", ""),
        ("math", r"so \boxed{1} or rather $\boxed{\left( \dfrac{1}{2}, 3 \right)}$.", r"(\frac{1}{2},3)"),
        ("math", r"\boxed{ \frac{1}{2} , 3}.", r"\frac{1}{2},3"),
        ("math", r"\boxed{10,\!000}", "10000"),
        ("math", "10000", ""),
        ("countdown", "<answer> 3 + 5 </answer>", "3+5"),
        ("countdown", "let me see\n(3+ 5)", ""),
        ("countdown", "<answer>3+5</answer>\nyes", ""),
        ("countdown/bare", "let me see\n(3+ 5)", "(3+5)"),
        ("countdown/bare", "<answer>3+5</answer>\nyes", "3+5"),
        ("math_dapo", "Answer: $10$\n", "10"),
        ("countdown", "<answer>three and five</answer>", ""),
        ("multiply", "<answer>12 * 3 = 1,036</answer>", "1036"),
        ("multiply", "12 * 3 = 0036", "36"),
        ("multiply", "12 * 3 = many", ""),
        ("knights_knaves", "<answer>Bob is a knave, Ann is a knight</answer>", "ann is a knight, bob is a knave"),
        ("knights_knaves", "nobody is anything", ""),
        ("reasoning_gym/leg_counting", "<answer> 4\n legs </answer>", "4 legs"),
        ("reasoning_gym/leg_counting", "4 legs", ""),
    ],
)
def test_the_answer_in_a_response(source: str, response: str, answer: str) -> None:
    rule = rule_of(source)
    assert rule is not None and rule.answer is not None
    assert rule.answer(response) == answer


def test_every_rule_that_judges_an_answer_extracts_it() -> None:
    assert [name for name, rule in RULES.items() if rule.answer is None] == ["format"]
    assert not extracts_answers("format") and not extracts_answers("sudoku")


@pytest.mark.parametrize("source", [name for name in RULES if name != "format"])
def test_responses_without_an_answer_are_not_correct(source: str) -> None:
    rule = RULES[source]
    assert rule.answer is not None and rule.answer("") == ""
    assert RULES[source].score(source, "", GROUND_TRUTHS.get(source, "8"), {}) == 0.0


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("lighteval/MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("numina_olympiads", "math"),
        ("math_dapo", "math_dapo"),
        ("aime2024", "math_dapo"),
        ("aime_2025_dapo", "math_dapo"),
        ("countdown_3to4", "countdown"),
        ("countdown/bare", "countdown/bare"),
        ("yolo/arithmetic-3_digit", "multiply"),
        ("yolo/multiply-3_digit", "multiply"),
        ("openai/gsm8k", "openai/gsm8k"),
        ("codecontests", None),
        ("MATH", None),
        ("", None),
    ],
)
def test_the_rule_of_a_data_source(source: str, rule: str | None) -> None:
    assert name_of_rule(source) == rule
    assert rule_of(source) is (None if rule is None else RULES[rule])
