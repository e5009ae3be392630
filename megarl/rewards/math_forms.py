"""The forms of an answer in LaTeX: looks without a meaning, the sides of an equation, words, bases.

Math-verify compares mathematical objects. Some texts are no such objects, and math-verify reads them as one: it takes
the last side of `1=2=3`, the product of the letters of a word, and a number without its base.
"""

import re

_AS_LATEX = {
    **dict.fromkeys("−–﹣－", "-"),
    "×": "\\times ",
    "·": "\\cdot ",
    "÷": "\\div ",
    "½": "\\frac{1}{2}",
    "⅓": "\\frac{1}{3}",
    "⅔": "\\frac{2}{3}",
    "¼": "\\frac{1}{4}",
    "¾": "\\frac{3}{4}",
    "π": "\\pi ",
    "∞": "\\infty ",
    "≤": "\\le ",
    "≥": "\\ge ",
    "≠": "\\ne ",
    "°": "^\\circ ",
    "∅": "\\emptyset ",
    "⇒": "\\implies ",
    "→": "\\to ",
    **dict.fromkeys("✓✔✅", ""),
    **dict.fromkeys("\u00a0\u2009\u202f", " "),
    **dict(zip("０１２３４５６７８９＋＝（）．，：％", "0123456789+=().,:%", strict=True)),
}
_SIGNS = str.maketrans(_AS_LATEX)
_GROUPS = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:(?:\\[, ;:]|,\\!|\{,\}|~| )[0-9]{3})+)(?![0-9])")
_LOOKS = re.compile(
    r"\\(?:text)?color(?:\[[^\]{}]*\])?\{[^{}]*\}"
    r"|\\(?:underline|boldsymbol|bm|pmb|mathbf|emph|displaystyle|large|Large|huge|checkmark|boxed|fbox"
    r"|(?:blacksquare|square|blacktriangle|qed)(?=[\s$.]*$))(?![a-zA-Z])"
    r"|\*\*|__"
)
_WORDS_ALONE = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt)?|mathrm|mathsf|mbox|operatorname)\{([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z][A-Za-z ']{3,}|[A-Z]{3}")
_TOKENS = re.compile(
    r"\\(?:begin|end)\{[^{}]*\}|\\text\{ *(?:or|and) *\}|\\[a-zA-Z]+|\\.|:=|==|[<>!]=|.",
    re.DOTALL,
)
_MEMBER = re.compile(r",|;|\\\\|\\text\{.*\}")
_EQUALS = re.compile(r"=|:=|==|\\(?:equiv|sim|simeq|cong|propto)")
_LAYOUT = re.compile(r"\\(?:begin|end)\{(?:aligned|align\*?|split|gathered|cases|equation\*?)\}|(?<!\\)&")
_ROUGHLY = re.compile(r"(?<=\S)\s*\\approx(?![a-z]).*", re.DOTALL)
_BASE = re.compile(r"\(?[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?\)?_\{?(?:\\text\{)?([0-9]+|[a-z]+)\}?\}?")
_CONNECTIVES = re.compile(
    r"\\(?:implies|impliedby|iff|(?:L|l|R|r|Longr|longr|Leftr|leftr)(?:eft|ight)?arrow|to|mapsto|neg|lnot|land|lor|neq?|not)"
    r"(?![a-zA-Z])"
    r"|^\s*(?:\\(?:leq?|geq?|lt|gt)(?![a-zA-Z])|[<>])"
)
_OPERATORS = re.compile(
    r"[-+*/^<>!]|\\(?:d|t|c)?frac|\\(?:sqrt|cdot|times|div|sum|int|prod|d?binom|pm|mp|le|ge|in)(?![a-z])"
)
_ENDS = re.compile(r"(?:\\\\|\\[,;:! ]|[\s$])+$|^(?:\\[,;:! ]|[\s$])+")
_GROUPED = re.compile(r"[0-9],[0-9]{3}(?![0-9])")


def plain(latex: str) -> str:
    r"""Return an answer without what only changes its looks: `\color{red}{5} \checkmark.` becomes `{5}`."""
    text = _LOOKS.sub("", latex.translate(_SIGNS)).replace("\\textbf", "\\text").replace("\\varnothing", "\\emptyset")
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = _GROUPS.sub(lambda number: number[1] + re.sub(r"[^0-9]", "", number[2]), text)
    for _ in range(2):
        text = _ENDS.sub("", text)
        if text.endswith((".", ",", ";")) and not text.endswith(".."):
            text = text[:-1]
    return _WORDS_ALONE.sub(lambda words: words[0].replace(words[1], words[1].rstrip(".! ")) if words[1] else "", text)


def word(latex: str) -> str | None:
    """Return the small letters of an answer that is words: 4 letters or more, or 3 capitals; None if it is none."""
    text = " ".join(_WORDS_ALONE.sub(r"\1", latex).replace("{", "").replace("}", "").split())
    return text.lower() if _WORD.fullmatch(text) else None


def is_prose(latex: str) -> bool:
    """Return whether an answer has two words side by side, which math-verify reads as a product of letters."""
    return bool(re.search(r"[A-Za-z]{2,} +[A-Za-z]{2,}", re.sub(r"\\[a-zA-Z]+(?:\{[^{}]*\})?", " \\\\ ", latex)))


def members(latex: str) -> list[str]:
    """Return the answers of a list, or of the lines of an environment; one answer if there is no list."""
    plainer = latex if "matrix}" in latex or "array}" in latex else _LAYOUT.sub(" ", latex)
    return [part for part in _split(plainer, _MEMBER) if part] or [latex]


def sides(latex: str) -> list[str]:
    """Return the sides of an equation, or of a chain of equations; one side if there is no `=`."""
    inner = _ROUGHLY.sub("", latex.strip())
    while _EQUALS.search(inner) and inner.startswith(("(", "[", "{", "\\{")) and _closes_at_end(inner):
        inner = inner.removeprefix("\\")[1:-1].removesuffix("\\").strip()
    return [side for side in _split(inner, _EQUALS) if side] or [latex]


def _split(latex: str, separator: re.Pattern[str]) -> list[str]:
    """Return the parts between separators that are not in brackets."""
    parts, depth, start = list[str](), 0, 0
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


def is_name(side: str) -> bool:
    r"""Return whether a side of an equation names something, as `x`, `a_{10}`, `f(3)`, `\angle ABC` and `|AB|` do."""
    if re.fullmatch(r"\([a-z](?:,\s*[a-z])+\)", side):  # the unknowns of a system
        return True
    outside = re.sub(r"\([^()]*\)|_\{[^{}]*\}|_[0-9a-zA-Z]", "", side)
    return bool(re.match(r"[a-zA-Z\\|]", side)) and not _OPERATORS.search(outside) and not re.search("[0-9]", outside)


def connects(latex: str) -> bool:
    r"""Return whether an answer is a statement about others, as `6 \implies 5` and `\neg 5` are."""
    return bool(_CONNECTIVES.search(latex))


def base(latex: str) -> str | None:
    """Return the base in the index of a number, such as 8 of `2516_8`; None if there is none."""
    found = _BASE.fullmatch(latex.strip())
    return found[1] if found and re.search("[0-9]", latex.partition("_")[0]) else None
