r"""MATH: the last \boxed{...}, compared by math-verify and by its form, never run as code, in bounded time."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import math_verify.parser
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from math_verify import parse, verify
from sympy.core.cache import clear_cache
from sympy.parsing.sympy_parser import parse_expr

from megarl.rewards.built_in import RULES, rule_of
from megarl.rewards.math import answer_in, last_boxed, stated_answer
from megarl.rewards.math_equal import MAX_CHARACTERS, equal
from megarl.rewards.math_terms import bounded, load, term, verified

ROWS = [line.split("\t") for line in (Path(__file__).parent / "data/math_pairs.tsv").read_text().splitlines()[1:]]
JUDGED = {(truth, answer): verdict == "right" for verdict, truth, answer, _ in ROWS}
LIMITS = {(truth, answer) for _, truth, answer, reason in ROWS if reason}
CODE = [
    "__import__('os').getcwd()",
    r"\text{__import__('os').getcwd()}",
    "x_{__import__('os')}",
    r"\mathrm{exit}(7)",
    r"\operatorname{eval}(1)",
    "lambda: 1",
    "[x for x in (1,2)]",
    "print(1)",
    "Symbol('x')",
    "2*(3+4) foo",
    r"\foo 2*(3+4)",
    r"\foo 9**9 / 3",
    "1e5",
    "1.5E-3",
    "0x10",
    "final answer is 2+3. I hope",
    r"\int_0^1 x^2 dx",
    r"\sum_{k=1}^{9} k^2",
    r"\sum_{n=0}^{\infty} \frac{1}{n!}",
    r"\variable{print(1)}",
    r"\frac{d}{dx} x^2",
    r"\begin{vmatrix}1&2\\3&4\end{vmatrix}",
]
TRUTHS_FOR_CODE = ["7", "x^2", r"\text{Monday}"]
PAIRS = [*JUDGED, *((truth, answer) for truth in TRUTHS_FOR_CODE for answer in CODE)]


class Watch:
    """Notes code that Python compiles or runs while it is armed, except during imports of modules."""

    def __init__(self) -> None:
        self.is_armed = False
        self.seen: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_armed or event not in ("compile", "exec"):
            return
        frame: FrameType | None = sys._getframe()
        while frame := frame.f_back:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return
        self.seen.append(f"{event}: {arguments[0]!r}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    found = Watch()
    sys.addaudithook(found)  # a hook cannot be removed
    return found


def forget() -> None:
    """Empty the caches, so that each of two readers parses for itself."""
    for name in ("parse_latex_cached", "parse_expr_cached", "extract_latex"):
        getattr(math_verify.parser, name).cache_clear()
    clear_cache()


@pytest.fixture(scope="module")
def verdicts(watch: Watch) -> Iterator[dict[tuple[str, str], bool]]:
    """Return math-verify's results in our hands for all pairs and for code, by truth and answer."""
    load()
    forget()
    watch.is_armed = True
    found = {(truth, answer): verified(answer, truth) for truth, answer in PAIRS}
    watch.is_armed = False
    forget()
    yield found


def test_math_verify_is_asked_as_it_is(verdicts: dict[tuple[str, str], bool]) -> None:
    assert len(JUDGED) > 300
    gold = {truth: parse(rf"\boxed{{{truth}}}") for truth, _ in verdicts}
    theirs = {(truth, answer): verify(gold[truth], parse(rf"\boxed{{{answer}}}")) for truth, answer in verdicts}
    assert {pair for pair in verdicts if verdicts[pair] != theirs[pair]} == set()


def test_math_verdicts_match_hand_judgements_except_known_limits() -> None:
    assert {(truth, answer) for (truth, answer), right in JUDGED.items() if equal(answer, truth) != right} == LIMITS


def test_only_code_generated_by_sympy_is_executed(watch: Watch, verdicts: dict[tuple[str, str], bool]) -> None:
    sources = [note for note in watch.seen if note.startswith("compile")]
    assert [source for source in sources if not source.startswith("compile: b'def monomial_")] == []
    assert len(watch.seen) == 2 * len(sources)  # each source is compiled, then run
    assert {pair for pair in verdicts if any(len(pair[1]) > 3 and pair[1] in source for source in sources)} == set()
    noticed, watch.seen = watch.seen, []
    watch.is_armed = True
    parse("$7$")
    watch.is_armed = False
    assert any("Integer (7 )" in note for note in watch.seen)  # the rule avoids this code
    watch.seen = noticed


ARITHMETIC = st.recursive(
    st.sampled_from(["1", "2", "3", "10", "0.5", "2.", ".25", "-4"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", " / "]), inner).map("".join),
        st.tuples(inner, st.just("**"), st.sampled_from(["2", "0", "-1"])).map(
            lambda parts: f"({parts[0]}){parts[1]}{parts[2]}"
        ),
        inner.map(lambda text: f"({text})"),
    ),
    max_leaves=5,
)


@given(ARITHMETIC, st.sampled_from([None, False]))
def test_arithmetic_is_read_as_sympy_reads_it(text: str, evaluate: bool | None) -> None:
    ours = term(text, evaluate=evaluate).doit()
    theirs = parse_expr(text, **({} if evaluate is None else {"evaluate": evaluate})).doit()
    assert ours == theirs or abs(ours - theirs) < 1e-9 * max(1, abs(theirs))


@pytest.mark.parametrize("text", ["__import__('os')", "x", "yotta", "f(2)", "[1]", "1 if 1 else 2", "'a'", ""])
def test_nothing_else_is_read(text: str) -> None:
    with pytest.raises(ValueError):
        term(text)


def test_sympy_generates_no_code_from_symbol_names() -> None:
    with bounded(), pytest.raises(NotImplementedError):
        sympy.lambdify(sympy.Symbol("x"), sympy.Symbol("print(1)"))


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{ 2 }", "2"),
        (r"\boxed{1} or \fbox{3}", "3"),
        (r"\boxed {6}", "6"),
        (r"\boxed{\text{see }\boxed{6}}", "6"),
        (r"\boxed{\left\{1,2\right.}", r"\left\{1,2\right."),
        (r"\\boxed{5}", "5"),
        (r"{ \boxed{5} and }", "5"),
        (r"$\boxed 5$.", "5"),
        (r"$\boxed5$.", "5"),
        (r"\(\boxed\frac12\) is it", r"\frac12"),
        (r"$\boxed 12$ of $x$", "12"),
        (r"hence \boxed 5.", "5"),
        (r"\boxed{7} is in \boxed form", "7"),
        (r"\boxed{7} stands in \boxed{}", "7"),
        (r"\boxed{7} and then \boxed{\frac{1}", "7"),
        (r"\boxed{7} and then \boxed{", "7"),
        (r"\boxed{\boxed{7} and", "7"),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed", None),
        ("42", None),
    ],
)
def test_the_last_box(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed
    assert RULES["math"].score("math", text, boxed or "7", None) == float(boxed is not None)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Thus.\nAnswer: 5", "5"),
        ("**Answer:** $5$.", "5"),
        ("answer:\n\n5 \nor so", "5"),
        ("Answer: 3\nNo, Answer: 4", "4"),
        (r"Answer: \boxed{7}, I hope", "7"),
        ("Answer: 5\n\nThe answer is correct", "5"),
        ("The final answer is: 5", "5"),
        ("The answer is $5$.", "5"),
        ("The answer is 3\nAnswer: 5", "5"),
        ("Answer: `5`", "`5`"),
        (r"**Answer:** \(\frac{1}{2}\).", r"\(\frac{1}{2}\)"),
        ("Answer: $5$ dollars", "5$ dollars"),
        (r"\boxed{3} is it", "3"),
        ("it is 5", None),
    ],
)
def test_stated_answer_is_extracted_from_response(text: str, answer: str | None) -> None:
    assert stated_answer(text) == answer
    assert RULES["math_dapo"].score("math_dapo", text, answer or "5", None) == float(answer is not None)


@pytest.mark.parametrize(
    "answer", ["`5`", '"5"', "“5”", r"\(5\)", r"\[5\]", "$5$", "$5$ dollars", "5 people", "\n$$\n5\n$$"]
)
def test_stated_answer_ignores_surrounding_text(answer: str) -> None:
    assert RULES["math_dapo"].score("math_dapo", f"Answer: {answer}", "5", None) == 1.0
    assert RULES["math_dapo"].score("math_dapo", f"Answer: {answer}", "6", None) == 0.0


@pytest.mark.parametrize(
    "answers",
    [
        [r"\left( \dfrac{1}{2}, 3 \right)", r"(\frac{1}{2},3)", r"( \tfrac{1}{2},\; 3)"],
        [r"10,\!000", "10000", r"10{,}000", r"10\,000", "10000."],
        [r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"],
        ["x = 5", "x=5", r"\displaystyle x=5"],
        ["1 2"],
        ["12"],
        ["1 1/2"],
        ["11/2"],
        [r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}"],
        [r"\begin{pmatrix} 1 3 \end{pmatrix}"],
    ],
)
def test_answers_that_only_look_different_are_one(answers: list[str]) -> None:
    (text,) = {answer_in(rf"\boxed{{{answer}}}") for answer in answers}
    assert text
    others = [r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}", "1 2", "12", "1 1/2", "11/2"]
    assert text not in {answer_in(rf"\boxed{{{other}}}") for other in others if other not in answers}


def test_differences_that_are_documented() -> None:
    def plain(response: str, truth: str) -> bool:
        return bool(verify(parse(rf"\boxed{{{truth}}}"), parse(response)))

    def ours(response: str, truth: str) -> float:
        return RULES["math"].score("math", response, truth, None)

    outside_a_box = "The final answer is $5$."
    assert (plain(outside_a_box, "5"), ours(outside_a_box, "5")) == (True, 0.0)
    two_boxes = r"$x=\boxed{1}$ or $\boxed{2}$"
    assert (plain(two_boxes, "1,2"), ours(two_boxes, "2"), ours(two_boxes, "1,2")) == (True, 1.0, 0.0)
    long = r"\boxed{5" + " " * MAX_CHARACTERS + r"\cdot 1}"
    assert (plain(long, "5"), ours(long, "5")) == (True, 0.0)
    cut = r"It is \boxed{5}, since \boxed{\frac{1}"
    assert (plain(cut, "5"), ours(cut, "5")) == (False, 1.0)


def test_an_answer_is_found_for_every_name() -> None:
    for source in ("math", "math_dapo", "aime2025", "lighteval/MATH"):
        rule = rule_of(source)
        assert rule is not None and rule.answer is not None
        assert rule.answer(r"\boxed{ 5 }") == "5"
