r"""MATH: the last \boxed{...}, compared as mathematics, never run as code."""

import threading
from typing import Any

import pytest
import sympy.parsing.sympy_parser

from megarl.rewards import REWARDS
from megarl.rewards.math import cheap, equal, last_boxed


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{ 2 }", "2"),
        (r"\boxed{1} or \fbox{3}", "3"),
        (r"\boxed{\frac{1}{2}", None),
        ("42", None),
    ],
)
def test_the_last_box(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        (r"\frac{2}{4}", r"\frac12"),
        (r"10,\!000", "10000"),
        ("x=5", "5"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        (r"2x^2+3x^2", "5x^2"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
        (r"\text{Monday}", r"\text{ Monday }"),
        (r"2^{10}", "1024"),
    ],
)
def test_the_same_written_otherwise(answer: str, truth: str) -> None:
    assert equal(answer, truth)
    assert REWARDS["math"]("math", rf"Thus \boxed{{{answer}}}.", truth, None) == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("0.51", r"\frac{1}{2}"), ("x^3", "x^2"), ("(1,2)", "(2,1)"), ("", "5"), ("-5", "5"), (r"\frac{", "1")],
)
def test_what_differs(answer: str, truth: str) -> None:
    assert not equal(answer, truth)


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9}}",
        "9^9^9",
        "9^{9}^{9}",
        "((9^{999})^{999})^{999}",
        "9^{999999999}",
        "9^ { 999999999 }",
        "99999999!",
        r"\binom{1000000000}{500000000}",
        r"\prod_{k=1}^{999}k",
        "9**9**9",
        "1e999999999",
        "(x+y)^{9999}",
        "(x+y+z+w)^{999}",
        "(" * 200_000,
        "9" * 100,
        r"__import__('os').system('false')",
    ],
)
def test_hostile_answers_are_wrong_at_once(answer: str) -> None:
    assert not equal(answer, "5")


def test_bounds_of_what_is_evaluated() -> None:
    assert cheap("x^5+x^4+x^3+x^2+x")
    assert cheap("2^{2009}")
    assert not cheap("2^{10001}")
    assert cheap("(x+1)^{10}(x-1)^2")
    assert not cheap("(x+1)^{10}(x-1)^3")
    assert not cheap(r"\sum_{k}k")


def test_an_answer_that_is_not_evaluated_may_still_be_right_to_the_letter() -> None:
    assert equal("2^{99999999}", "2^{99999999}")


def test_threads_score_too() -> None:
    scores: list[bool] = []
    thread = threading.Thread(target=lambda: scores.append(equal("0.5", r"\frac{1}{2}")))
    thread.start()
    thread.join()
    assert scores == [True]


def test_only_numerals_reach_the_parser_that_ends_in_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    parse = sympy.parsing.sympy_parser.parse_expr

    def spy(text: str, *arguments: Any, **options: Any) -> Any:
        seen.append(text)
        return parse(text, *arguments, **options)

    for module in ("sympy.parsing.sympy_parser", "math_verify.parser", "latex2sympy2_extended.latex2sympy2"):
        monkeypatch.setattr(f"{module}.parse_expr", spy)
    code = "__import__('os').getcwd()"
    for answer in (code, rf"\text{{{code}}}", rf"f({code})", f"x_{{{code}}}", r"\mathrm{exit}(7)", "x+7=12", "7.5"):
        equal(answer, "7")
    assert seen
    assert all(text.replace(".", "").isdigit() for text in seen)
