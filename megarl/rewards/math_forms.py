"""The forms of an answer in LaTeX: looks without a meaning, the sides of an equation, words, bases.

Math-verify compares mathematical objects. Some texts are no such objects, and math-verify reads them as one: it takes
the last side of `1=2=3`, the product of the letters of a word, and a number without its base.
"""

import re
from decimal import Decimal

from megarl.rewards.math_signs import MARK, with_latex_signs, without_delimiters, without_marks
from megarl.rewards.units import Quantities, quantities_of

_GROUPS = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:(?:\\[, ;:]|,\\!|\{,\}|~| )[0-9]{3})+)(?![0-9])")
_LOOKS = re.compile(
    r"\\(?:text)?color(?:\[[^\]{}]*\])?\{[^{}]*\}"
    r"|\\(?:underline|boldsymbol|bm|pmb|mathbf|emph|displaystyle|large|Large|huge|checkmark|boxed|fbox"
    r"|(?:blacksquare|square|blacktriangle|qed)(?=[\s$.]*$))(?![a-zA-Z])"
    r"|\*\*|__"
)
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)|mbox|math(?:rm|sf|it)|operatorname)\s*\{")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_NO_TEXT = re.compile(r"\\text\{\s*\}")
_FRACTION_OF_UNITS = re.compile(r"\\[dt]?frac ?\{ ?(\\text\{[^{}]*\}) ?\} ?\{ ?(\\text\{[^{}]*\}(?:\^\{?[23]\}?)?) ?\}")
_SIGNS_OF_UNITS = (
    (re.compile(r"\\\$"), " $ "),
    (re.compile(r"\\?%"), " percent "),
    (re.compile(r"\^\{? ?\\(?:circ|degree) ?\}?"), " degree "),
    (re.compile(r"\\(?:[,;:! ]|cdot(?![a-z]))|~"), " "),
)
_BARE_QUANTITY = re.compile(
    r"[ $]*[-+]?[0-9.,]+ ?(?:[a-zA-Z]+(?:\^\{?[23]\}?)? ?(?:/ ?[a-zA-Z]+(?:\^\{?[23]\}?)?)?)[ .]*"
)
_COMMAND = re.compile(r"\\(?!text\{)[a-zA-Z]+")
_LETTERS = re.compile(r"[A-Za-z][A-Za-z '-]+")
_PRODUCT = re.compile(r"[a-dhkmnp-z]{2,4}")
_FAMILIES = ("abcd", "mn", "pqrs", "uvw", "xyz")
_TOKENS = re.compile(
    r"\\(?:begin|end)\{[^{}]*\}|\\text\{ *(?:or|and) *\}|\\[a-zA-Z]+|\\.|:=|==|[<>!]=|.",
    re.DOTALL,
)
_COMMA = re.compile(",")
_MEMBER = re.compile(r",|;|\\\\|\\text\{.*\}")
_CONJUNCTIONS = re.compile(r"[,;]?\s*\\text\{[,; ]*(?:and|or)[,; ]*\}")
_BARE_CONJUNCTION = re.compile(r"\\text\{[^{}]*\}|[,;]?\s*(?<![a-zA-Z\\])(and|or)(?![a-zA-Z])\s*")
_EQUALS = re.compile(r"=|:=|==|\\(?:equiv|sim|simeq|cong|propto)")
_LAYOUT = re.compile(
    r"\\(?:begin|end)\{(?:aligned|align\*?|split|gathered|cases|equation\*?)\}|(?<!\\)&(?= *(?:[=<>]|\\[gl]e))"
)
_ESTIMATE = re.compile(r"\\approx")
_DECIMAL = re.compile(r"[-+]? ?[0-9]+(?:\.[0-9]+)?")
_MERIDIEM = re.compile(r"(?<=[0-9]) ?([ap])\.?m(?![a-z])\.?", re.IGNORECASE)
_FREE_BLANKS = re.compile(r" (?![^\W_])|(?<![^\W_])(?<![0-9],) |(?<=,) (?![0-9])")
"""Blanks that separate nothing: `58, 500` are two numbers, and `58,500` is one."""
_MEMBERSHIP = re.compile(r"^[\s$]*[a-z] *\\in(?![a-z])")
_BLACKBOARD = re.compile(r"\\mathbb\s*([A-Z])(?![a-zA-Z])")
_BASE_IN_WORDS = re.compile(r"_\{? ?\\text\{ ?([a-z]+) ?\} ?\}?")
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_BASE = re.compile(r"\(?[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?\)?_\{?(?:\\text\{)?([0-9]+|[a-z]+)\}?\}?")
_SIZED = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])|\s|(?<=^)\$|\$$")
_STATES_INTERVAL = re.compile(r"[<>]|\\(?:[lg](?:e|t|eq|eqslant)|cup|begin)(?![a-z])")
_OBJECT = re.compile(r"\\(angle|measuredangle|triangle|overline|overrightarrow)[ {]*([A-Z]{2,})\}?")
_POINTS = re.compile(r"[ {$]*([A-Z]{2,})[ }$]*")
_ENDS = re.compile(r"(?:\\\\|\\[,;:! ]|[\s$])+$|^(?:\\[,;:! ]|[\s$])+")
_GROUPED = re.compile(r"[0-9],[0-9]{3}(?![0-9])")


def plain(latex: str) -> str:
    r"""Return an answer without what only changes its looks: `\color{red}{5} \checkmark.` becomes `{5}`."""
    signs = " ".join(with_latex_signs(without_delimiters(latex)).split())
    text = _TEXT_COMMAND.sub(r"\\text{", _LOOKS.sub(MARK, signs)).replace("\\varnothing", "\\emptyset")
    text = without_marks(_NO_TEXT.sub(MARK, text))
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = _MEMBERSHIP.sub("", text)
    text = _BLACKBOARD.sub(r"\\mathbb{\1}", _BASE_IN_WORDS.sub(_base_in_digits, text))
    text = _GROUPS.sub(lambda number: number[1] + re.sub(r"[^0-9]", "", number[2]), text)
    text = _ENDS.sub("", text)
    if text.endswith((".", ",", ";")) and not text.endswith(".."):
        text = _ENDS.sub("", text[:-1])
    return _TEXT.sub(lambda words: words[0].replace(words[1], words[1].rstrip(".! ")), text)


def _base_in_digits(index: re.Match[str]) -> str:
    return f"_{{{_BASES.index(index[1]) + 2}}}" if index[1] in _BASES else index[0]


def flat(latex: str) -> str:
    r"""Return an answer without `\text`, with blanks between letters and digits alone: `3:30\text{ PM}` is `3:30pm`."""
    text = _TEXT.sub(r" \1 ", latex).replace("\\!", " ")
    text = _FREE_BLANKS.sub("", " ".join(text.split()))
    return _MERIDIEM.sub(lambda found: f"{found[1].lower()}m", text)


def meridiem(latex: str) -> str | None:
    """Return whether a time is `a` (before noon) or `p` (after noon); None if the answer has neither."""
    found = _MERIDIEM.search(flat(latex))
    return found[1].lower() if found else None


def quantities(latex: str) -> Quantities:
    r"""Return the units that other units exclude, also those in plain text, and `\$`, `\%` and `^\circ`."""
    text = _FRACTION_OF_UNITS.sub(r"\1/\2", latex)
    for pattern, sign in _SIGNS_OF_UNITS:
        text = pattern.sub(sign, text)
    is_bare = bool(_BARE_QUANTITY.fullmatch(text))
    words = _TEXT.sub(r" \1 " if is_bare else _quoted, text)
    return quantities_of(_COMMAND.sub(" 0 ", words), single_letters=is_bare)


def _quoted(words: re.Match[str]) -> str:
    return re.sub(r"(?<![a-zA-Z])(?=[a-zA-Z](?![a-zA-Z]))", "'", f" {words[1]} ")


def letters(latex: str) -> str | None:
    """Return the letters of an answer that is words, with blanks between words; None if it is anything else."""
    text = " ".join(_TEXT.sub(r"\1", latex).replace("{", "").replace("}", "").split())
    return text if _LETTERS.fullmatch(text) else None


def same_words(found: str, gold: str) -> bool | None:
    """Return whether an answer has the words of the truth; None if the truth is no word, or may be a product.

    `xyz` and `bx` may be products, `no` and `ten` may not. The letters of a product of one family, such as `ab` and
    `xyz`, commute. Case counts for one to three capitals outside `\\text`, which are points.
    """
    of_gold = letters(gold)
    of_found = letters(found)
    if of_gold is None:
        return None
    if _PRODUCT.fullmatch(gold) and (of_found is None or any(gold in family for family in _FAMILIES)):
        return None
    if of_found is None:
        return False
    are_points = gold.isupper() and len(gold) <= 3 and gold not in ("NO", "YES")
    return of_found == of_gold if are_points else of_found.lower() == of_gold.lower()


def is_prose(latex: str) -> bool:
    """Return whether an answer has two words side by side, which math-verify reads as a product of letters."""
    return bool(re.search(r"[A-Za-z]{2,} +[A-Za-z]{2,}", re.sub(r"\\[a-zA-Z]+(?:\{[^{}]*\})?", " \\\\ ", latex)))


def members(latex: str) -> list[str]:
    """Return the answers of a list, or of the lines of an environment; one answer if there is no list."""
    plainer = latex if "matrix}" in latex or "array}" in latex else _LAYOUT.sub(" ", latex)
    words = _BARE_CONJUNCTION.sub(lambda found: r"\text{and}" if found[1] else found[0], plainer)
    return _split(_CONJUNCTIONS.sub(r"\\text{and}", words), _MEMBER)


def estimate(latex: str) -> tuple[str, str | None]:
    r"""Return the parts of an answer before and after its first `\approx`; the second is None if there is none."""
    parts = _split(latex, _ESTIMATE)
    if len(parts) == 1 or not parts[0]:
        return latex, None
    return parts[0], "\\approx".join(parts[1:])


def decimal(latex: str) -> Decimal | None:
    """Return the value of a decimal number; None for anything else."""
    return Decimal(latex.replace(" ", "")) if _DECIMAL.fullmatch(latex) else None


def sides(latex: str) -> list[str]:
    """Return the sides of an equation, or of a chain of equations; one side if there is no `=`."""
    inner = latex.strip()
    while _EQUALS.search(inner) and inner.startswith(("(", "[", "{", "\\{")) and _closes_at_end(inner):
        inner = inner.removeprefix("\\")[1:-1].removesuffix("\\").strip()
    return _split(inner, _EQUALS)


def _split(latex: str, separator: re.Pattern[str]) -> list[str]:
    """Return the parts between separators that are not in brackets."""
    parts = list[str]()
    depth = 0
    start = 0
    for token in _TOKENS.finditer(latex):
        depth = max(0, depth + _depth_of(token[0]))
        is_grouping = _GROUPED.match(latex, max(0, token.start() - 1)) and token[0] == ","
        if depth == 0 and separator.fullmatch(token[0]) and not is_grouping:
            parts.append(latex[start : token.start()].strip(" $"))
            start = token.end()
    return [*parts, latex[start:].strip(" $")]


def _depth_of(token: str) -> int:
    if token in ("{", "(", "[", "\\{") or token.startswith("\\begin{"):
        return 1
    return -1 if token in ("}", ")", "]", "\\}") or token.startswith("\\end{") else 0


def _closes_at_end(latex: str) -> bool:
    """Return whether the bracket at the beginning is closed by the last character."""
    depth = 0
    for token in _TOKENS.finditer(latex):
        depth += _depth_of(token[0])
        if depth <= 0:
            return token.end() == len(latex)
    return False


def base(latex: str) -> str | None:
    """Return the base in the index of a number, such as 8 of `2516_8`; None if there is none."""
    found = _BASE.fullmatch(latex.strip())
    return found[1] if found and re.search("[0-9]", latex.partition("_")[0]) else None


def ends(latex: str) -> list[str]:
    """Return `a` and `b` of `(a,b)`, `[a,b)` or the like, an interval or a point in a plane; none for others."""
    text = _SIZED.sub("", latex)
    is_bracket = text.startswith(("(", "[")) and text.endswith((")", "]")) and _closes_at_end(text)
    parts = _split(text[1:-1], _COMMA) if is_bracket else []
    return parts if len(parts) == 2 else []


def may_be_pair(latex: str) -> bool:
    """Return whether an answer has the form of an interval or a point, and is no set, list or number."""
    if _STATES_INTERVAL.search(latex):
        return True
    text = _SIZED.sub("", sides(latex)[-1])
    while text.startswith("{") and _closes_at_end(text):
        text = text[1:-1]
    return len(members(latex)) == 1 and text.startswith(("(", "["))


def same_points(found: str, gold: str) -> bool:
    r"""Return whether the angles, triangles and segments of two answers have the same points in their order.

    An angle and a segment may be read from both ends: `\angle ABC` is `\angle CBA`. Answers without them agree.
    """
    of_found, of_gold = (sorted(map(_points, _OBJECT.finditer(text))) for text in (found, gold))
    alone = _OBJECT.fullmatch(gold)
    bare = _POINTS.fullmatch(found)
    if alone and bare:
        return bare[1] in (alone[2], _points(alone)[1])
    return not of_found or not of_gold or of_found == of_gold


def _points(found: re.Match[str]) -> tuple[str, str]:
    kind = found[1].removeprefix("measured")
    points = found[2]
    return kind, min(points, points[::-1]) if kind in ("angle", "overline") else points
