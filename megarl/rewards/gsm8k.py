"""GSM8K: the number after `####` (strict), or the last number of the response (flexible), equals the ground truth.

A grammar derives the line of the strict rule: perhaps the name of the number, the number, perhaps its unit. A line
that the grammar does not derive has no answer: `#### 18 or 19`, `#### 18M` and `#### 18/5`.
"""

import re
from collections.abc import Mapping
from decimal import Decimal

from megarl.rewards.markup import GAP, without_markup
from megarl.rewards.notation import NUMERAL, as_ascii, exact_number, join_thousands
from megarl.rewards.units import CURRENCIES, is_name, is_unit_phrase

_MARK = "####"
_MAX_LINE = 1000
"""Most characters of the line of an answer."""
_BLANK = f"[ {GAP}]*"
_LINE = re.compile(
    rf"(?:=|(?P<name>[a-zA-Z {GAP}]+)(?:[=:]|\bis\b))?{_BLANK}"
    rf"(?P<sign>[-+]?){_BLANK}(?P<money>(?:{'|'.join(map(re.escape, CURRENCIES))})?){_BLANK}(?P<second>-?){_BLANK}"
    rf"(?P<digits>{NUMERAL})(?P<rest>(?![0-9]).*)"
)
"""A line with an answer; `is_name` and `is_unit_phrase` know the names and the units that it may have."""
# a minus after a digit or a parenthesis is a subtraction, not a sign
_PUNCTUATION = re.compile(r"^(?:\.{2,}|,+)")
_RUN = re.compile(r"((?<![0-9.)])-)?\$?(?<![0-9.,])([0-9.,]+)")


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None
) -> float:
    """Return 1.0 if the number after the last `####` is correct, else 0.0. UserError if the truth is no number."""
    return float(exact_number(ground_truth) == extract_strict(solution_str))


def compute_score_flexible(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None
) -> float:
    """Return 1.0 if the last number of the response is correct, else 0.0. UserError if the truth is no number."""
    return float(exact_number(ground_truth) == extract_flexible(solution_str))


def right_answer(ground_truth: object) -> str:
    """Return a response that both rules score 1.0. Raises UserError if the ground truth is no number."""
    return f"{_MARK} {exact_number(ground_truth):f}"


def extract_strict(text: str) -> Decimal | None:
    """Return the number on the line after the last `####`; None if the grammar does not derive the line."""
    after_mark = next((part for part in reversed(text.split(_MARK)[1:]) if part.strip()), "").strip()
    line = after_mark.partition("\n")[0].strip()
    if len(line) > _MAX_LINE:
        return None
    plain = " ".join(without_markup(join_thousands(as_ascii(line)), parentheses=True).split(" "))
    found = _LINE.fullmatch(plain.strip(f" {GAP}"))
    if found is None or (found["sign"] and found["second"]):
        return None
    name = found["name"]
    if name is not None and not is_name(name.replace(GAP, " ")):
        return None
    if not is_unit_phrase(found["rest"].replace(GAP, " "), of_money=bool(found["money"])):
        return None
    return Decimal(("-" if "-" in found["sign"] + found["second"] else "") + found["digits"])


def extract_flexible(text: str) -> Decimal | None:
    """Return the last number; None if there is none, or if its commas and points do not make one number."""
    runs = _RUN.findall(join_thousands(as_ascii(text)))
    minus, run = next((found for found in reversed(runs) if found[1].strip(".,")), ("", ""))
    digits = _PUNCTUATION.sub("", run.rstrip(".,"))
    return Decimal(minus + digits) if re.fullmatch(NUMERAL, digits) else None


def answer_in(text: str) -> str:
    """Return the answer of the strict rule, the same text for equal numbers; '' if there is none."""
    return _text(extract_strict(text))


def answer_in_flexible(text: str) -> str:
    """Return the answer of the flexible rule, the same text for equal numbers; '' if there is none."""
    return _text(extract_flexible(text))


def _text(number: Decimal | None) -> str:
    if number is None:
        return ""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
