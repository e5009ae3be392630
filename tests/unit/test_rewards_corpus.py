"""Right and wrong answers in the forms that people and models write, for each rule; ¶ is a line break."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from megarl.rewards.built_in import RULES

Case = tuple[str, Any, bool]
"""A response, the ground truth, and whether the response is right."""

NUMBER = """{n}|{n}.|{n},|{n}.0|{n}.00|+{n}|({n})|= {n}|**{n}**|*{n}*|_{n}_|`{n}`|"{n}"|${n}|\\${n}|$ {n}|€{n}|₹{n}|{n}€
USD {n}|{n} USD|${n}$|$\\${n}$|\\({n}\\)|\\[{n}\\]|\\boxed{{{n}}}|$\\boxed{{{n}}}$|$\\boxed{{{n}}}$.|$\\text{{{n}}}$
**${n}$**|$**{n}**$|x = {n}|x={n}|Answer: {n}|**Answer:** {n}|**Answer**: {n}|The answer = {n}|The answer is {n}
The total cost is {n}|{n} dollars|{n} dollars.|{n} dollars!|({n} dollars)|{n} (dollars)|{n}%|{n}\\%|{n} percent
{n} km/h|{n} cm^2|{n} m²|{n} m|{n}kg|{n} kg|**{n}** dollars|**{n} dollars**|\\boxed{{{n}}} dollars
${n}\\text{{ dollars}}$|{n} dollars per day|{n}°|{n} °C|{n} miles per hour|{n} eggs|{n} more apples|{n} years old
${n} per hour|${n}/hour|{n} square feet|{n} in total minutes|{n} left|{n} of them|¶{n}|{n}¶and so on, 5"""
NO_NUMBER = """{n}/1000|{n} million|{n}M|{n}m|${n}m|${n} m|{n} lakh|{n} squared|{n}!|{n} negative|{n} isn't|{n}e5|{n}^2
{n}²|{n}*5|{n}×5|{n}÷5|{n}**1|{n}`1`|{n}{{1}}|1{{{n}}}|({n})1|{n}(1)|1 ({n})|{n}:30|{n} or 19 or 20|{n} 19 20 21
{n}=19|19={n}|{n} and 3 more|{n}k|{n} k|{n}K|{n} K|{n}bn|{n}-19|{n} to 20|19 ({n})|{n} (19)|{n}x|{n}i|{n} or nineteen
{n} and a half|{n} and a quarter|{n} half|not {n}|Nope: {n}|wrong = {n}|minus: {n}|{n} is wrong|{n} + 1|{n} - 1|{n} 1/2
{n} thousand|{n} hundred|{n} dozen|{n} pairs|{n} tenths|{n};19|{n}, 19|--{n}|+-{n}|-$-{n}|({n}|{n})|**{n}|{n}**
{n} plus one|{n} minus 1|{n} times two|no {n}|{n}!5|{n} 1|1 {n}|{n}\\%5|{n}%%|{n}?|{n}..|{n} dollars?|{n} dollars!!
{n} m dollars|{n} m pesos|{n} m USD|{n} $ m|{n} % %|{n} $ %
{n} of|{n} to|{n} a|{n}/|{n} km//h|{n} dollars or so|about {n}|~{n}|≈ {n}|>{n}|{n} dollars, not 5|{n} people's
\\frac{{{n}}}{{5}}|{n}.5|{n}1|-{n}||nothing|?|Ann = {n}|{n} apples oranges pears plums kiwis"""
GROUPED = """1,018|1 018|1\\,018|1\\ 018|1{,}018|1~018|1,\\!018|$1,018|$1,018.00|1,018 dollars|１０１８
\\boxed{1,018}|1\u202f018"""
NOT_GROUPED = "0,018|1,018 018|1,018,18|1,0,18|10,18|1 01 8|1,01,8|1.018|1018,000|101 8|0,1018,"
NEGATIVE = "-7|- 7|−7|–7|-7.0|$-7|-$7|\\$-7|**-7**|x = -7|-7 degrees|-7°C|\\boxed{-7}|$-7$|\\text{-7}"


def forms(text: str) -> list[str]:
    return [form.replace("¶", "\n") for form in re.split(r"[|\n]", text)]


def gsm8k() -> Iterator[Case]:
    for number in ("18", "4", "305"):
        yield from ((f"So 3 + 4.\n#### {form.format(n=number)}", number, True) for form in forms(NUMBER))
        yield from ((f"So 3 + 4.\n#### {form.format(n=number)}", number, False) for form in forms(NO_NUMBER))
    yield from ((f"#### {form}", "1018", True) for form in forms(GROUPED))
    yield from ((f"#### {form}", 1018, False) for form in forms(NOT_GROUPED))
    yield from ((f"#### {form}", "-7", True) for form in forms(NEGATIVE))
    yield from ((f"#### {form}", "7", False) for form in forms(NEGATIVE))
    yield "#### 7\n#### 18", "18", True
    yield "#### 18\n#### 7", "18", False
    yield "#### 18\n####", "18", True
    yield "18", "18", False


def multiply() -> Iterator[Case]:
    right = """{p}|{p}.|{p}.0|{p}.00|+{p}|**{p}**|${p}$|\\boxed{{{p}}}|\\({p}\\)|\\text{{{p}}}|x = {p}
*{p}*|`{p}`|{p},|= {p}|**{a} * {b} = {p}**|{a} x {b} = {p}|{a} times {b} = {p}|${a} \\cdot {b} = \\boxed{{{p}}}$
{a} * {b} = **{p}**|the product = {p}|{a} * {b} = {p}|{a}*{b}={p}|{a} × {b} = {p}|{a} \\times {b} = {p}
{a} \\cdot {b} = {p}
{b} * {a} = {p}|({a}) * ({b}) = {p}| {p} |¶{p}¶|{a}*{b}=1*{p}={p}"""
    wrong = """1=2={p}|{a}={p}|{p}/2|{p}^2|{p} or 5|{p}e5|-{p}|{p}1|1{p}|{p}.5|{a}*{a}*{b}*9={p}|{p} = 5
{a} != {p}|{a} ≠ {p}|{a} <= {p}|{a} >= {p}|{a}! = {p}|{a}x={p}|{a}%={p}|{a},{b}={p}|nope = {p}|not: {p}|{a} -> = {p}
{p}!
{p}%|{p}**2|{p}{{1}}|1{{{p}}}|{p}`1`|1`{p}`|{p}**1**|{a}=={p}|{a}:={p}|{a} or {b} = {p}|**{p}|{p}**|~{p}
about {p}|{p}, 5|{p} 5|{p}x|{p}*1|{a} * {b}|{p}=|({p}|1/0={p}|9**9**9={p}"""
    for first, second in ((12, 34), (7, 8), (41, 29), (99, 3), (64, 5)):
        names = {"a": first, "b": second, "p": first * second}
        yield from ((f"<answer>{form.format(**names)}</answer>", first * second, True) for form in forms(right))
        yield from ((f"<answer>{form.format(**names)}</answer>", first * second, False) for form in forms(wrong))
    yield from ((f"<answer>{form}</answer>", 1018, True) for form in forms("1,018|1 018|1\\,018|1{,}018|１０１８"))
    yield from ((f"<answer>{form}</answer>", -7, True) for form in forms("-7|- 7|−7|–7|**-7**|x = -7"))
    yield from ((f"so it is\n{form}", 56, True) for form in forms("56|7*8 = 56|$56$|**56**|it = 56"))
    yield from ((f"so it is\n{form}", 56, False) for form in forms("57|1=2=56|7*9 = 56|it is 56"))


def countdown() -> Iterator[Case]:
    right = """{a}*{b}+{c}|{c}+{a}*{b}|{b}*{a}+{c}|({a}*{b})+{c}|{a} * {b} + {c}| {a}*{b}+{c} |{a}×{b}+{c}
{a}·{b}+{c}|{a}∗{b}+{c}|{a}\\times {b}+{c}|{a} \\cdot {b}+{c}|${a}*{b}+{c}$|\\({a}*{b}+{c}\\)|\\[{a}*{b}+{c}\\]
**{a}*{b}+{c}**|{a}.*{b}+{c}|+{a}*{b}+{c}|{c}--{a}*{b}|{c}−−{a}*{b}"""
    wrong = """{a}*{b}-{c}|{a}*{b}|{a}+{b}+{c}|{t}|{a}*{b}+{c}+0|{a}*{b}+{c}+{c}|{a}*{b}+{c}={t}
{a}*{b}+{c} = {t}|{a}.{b}*{c}|{a}.{b}+{c}|{a}*{b}+{c} or {t}|{a}*{b}+{c};|({a}*{b}+{c}|{a}{b}+{c}|0{a}*{b}+{c}
{a}*{b}+{c}.0|{a}*{b}+.{c}|{a}e0*{b}+{c}|{a}x{b}+{c}|{a}({b})+{c}|{a},{b},{c}|the sum|{a}^{b}+{c}|{a}*{b}/0+{c}
{a}_*{b}+{c}|{a}*{b}+{c}#|print({t})||{b}**{a}**9**9**9"""
    for first, second, third in ((3, 7, 2), (5, 4, 9), (6, 8, 1), (11, 2, 13)):
        names = {"a": first, "b": second, "c": third, "t": first * second + third}
        truth = {"target": names["t"], "numbers": [first, second, third]}
        yield from ((f"<answer>{form.format(**names)}</answer>", truth, True) for form in forms(right))
        yield from ((f"<answer>{form.format(**names)}</answer>", truth, False) for form in forms(wrong))
    glued = (("6.5*2", 13, [6, 5, 2]), ("4.5*8", 36, [4, 5, 8]), ("7.5+2.5", 10, [7, 5, 2, 5]), (".5*8", 4, [5, 8]))
    yield from ((f"<answer>{text}</answer>", {"target": target, "numbers": of}, False) for text, target, of in glued)
    yield "<answer>6÷2</answer>", {"target": 3, "numbers": [2, 6]}, True
    yield "<answer>6\\div 2</answer>", {"target": 3, "numbers": [2, 6]}, True


KNIGHTS = {"names": ["Zoey", "Oliver"], "is_knight": [True, False]}
STATED = """{0} is a knight, {1} is a knave
{0} is a knight and {1} is a knave
{0}: knight, {1}: knave
{0}: Knight; {1}: Knave
{0} = knight, {1} = knave
{0} - knight, {1} - knave
{0} – knight, {1} – knave
{0} -> knight, {1} -> knave
{0} → knight, {1} → knave
{0} (knight), {1} (knave)
(1) {0} is a knight (2) {1} is a knave
1) {0}: knight, 2) {1}: knave
**{0}** is a **knight**, **{1}** is a **knave**
So {0} is a knight, and {1} is a knave.
Therefore, {0} is a knight while {1} is a knave
The answer is: {0} is a knight, {1} is a knave
Final answer: {0} is a knight, {1} is a knave
{1} is a knave, {0} is the knight
{0} is knight, {1} is knave
|{0}|knight|¶|{1}|knave|
| {0} | knight |¶| {1} | knave |
- {0}: knight¶- {1}: knave
The roles:¶{0} is a knight¶{1} is a knave
The roles are: {0} is a knight; {1} is a knave
| Name | Role |¶|---|---|¶| {0} | knight |¶| {1} | knave |
{0} is a knight.¶¶Therefore, {1} is a knave.
1. **{0}**: knight¶2. **{1}**: knave
**{0} is a knight, {1} is a knave**
* {0} is a knight¶* {1} is a knave
{0} is a knight & {1} is a knave
{0} is a knight! {1} is a knave!"""
SPOILT = """{all}. Vice versa
{all}. Just kidding
{all}. Ignore the above
{all}. Nope
{all}, or so
{all}?
{all} lol
{all}. 1
{all} (maybe)
{all}, it seems
{all}¶Hm.
{all}, {0}
Reversed:¶{all}
Suppose:¶{all}
Here is who is a knight:¶{all}
Opposite day: {all}
I guess {all}
Perhaps {all}
The answer is not: {all}
The wrong answer is: {all}
knight {all}
{0} {1} is a knight, {1} is a knave
{0}, {1} is a knight
{0} is a knight {1} is a knave
{0} is a knight/knave, {1} is a knave
{0} is a knighty, {1} is a knave
{0} is a (knight), {1} is a knave
{0} (knight, {1} (knave)
**{0} is a knight, {1} is a knave
{0} is a kni**ght**, {1} is a knave
{0} is a `kni`ght, {1} is a knave
{0} is anti knight, {1} is a knave
{all}. Or {1} is a knight, {0} is a knave
{all}. That is wrong
{all}. The opposite is true
{all}. This is false
{all}. Not really
{all}. {0} isn't a knight
{all}. {0} lies
{all}. No, {1} is a knight
{all}. {0} is a knave
It is false that:¶{all}
It is not true that {all}
If {0} is a knight, {1} is a knave
Either {0} is a knight, or {1} is a knave
{0} is a knight or {1} is a knave
{0} is a knight? {1} is a knave
Suppose {0} is a knight. {1} is a knave
{0} is not a knight, {1} is a knave
{0} is a knight, {1} is a knave, Emma is a knave
{0} is a knight, {0} is a knave, {1} is a knave
{all}. The reverse holds otherwise
{all}. Swap knights and knaves
{0} is a knight
knight, knave
"""


def knights() -> Iterator[Case]:
    for first, second in (("Zoey", "Oliver"), ("Mary Ann", "O'Neil"), ("Anne-Marie", "X1"), ("José", "Зоя")):
        truth = {"names": [first, second], "is_knight": [True, False]}
        for form in STATED.split("\n"):
            said = form.format(first, second).replace("¶", "\n")
            yield f"<answer>{said}</answer>", truth, True
            yield f"<answer>{said}</answer>", truth | {"is_knight": [False, True]}, False
        for form in SPOILT.split("\n"):
            every = f"{first} is a knight, {second} is a knave"
            yield f"<answer>{form.format(first, second, all=every)}</answer>".replace("¶", "\n"), truth, False


def format_() -> Iterator[Case]:
    for thoughts in ("two and two", "I see: 4", "嗯", "x\ny"):
        for answer in ("4", "yes", "\\boxed{4}", "四"):
            yield f"<think>{thoughts}</think><answer>{answer}</answer>", None, True
            yield f"<think>{thoughts}</think>{answer}", None, False
    for nothing in ("", " ", ".", "...", "\u200b", "\u200b\u200d", "-", "!"):
        yield f"<think>{nothing}</think><answer>4</answer>", None, False
        yield f"<think>so</think><answer>{nothing}</answer>", None, False


CORPORA = {
    "gsm8k": list(gsm8k()),
    "multiply": list(multiply()),
    "countdown": list(countdown()),
    "knights_knaves": list(knights()),
    "format": list(format_()),
}


@pytest.mark.parametrize("source", CORPORA)
def test_rule_scores_only_answers_its_page_accepts(source: str) -> None:
    paid = {
        (text, str(truth)): RULES[source].score(source, text, truth, {}) == 1.0 for text, truth, _ in CORPORA[source]
    }
    right = {(text, str(truth)): is_right for text, truth, is_right in CORPORA[source]}
    assert {case for case in paid if paid[case] != right[case]} == set()
    assert source == "format" or len(right) >= 150
    assert min(sum(right.values()), len(right) - sum(right.values())) >= 16
