r"""The signs that people write instead of LaTeX, and marks around an answer or its parts: `θ`, `2√3`, `x²`, `\(5\)`.

A mark becomes a blank. Between digits it stays a sign that no grammar knows: `1✓8` is not 18.
"""

import re
import unicodedata

MARK = "\x01"
"""The place of a mark that is gone, between digits."""

_COMMANDS = (
    "αβγδεζηθικλμνξρστφχψωΓΔΘΛΞΠΣΦΨΩϕ×÷±∓π∞≤≥≠∪∩∈⌊⌋⌈⌉∠△∅⇒→≈",
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi omega Gamma"
    " Delta Theta Lambda Xi Pi Sigma Phi Psi Omega phi times div pm mp pi infty le ge neq cup cap in lfloor rfloor"
    " lceil rceil angle triangle emptyset implies to approx",
)


def _as_fraction(sign: str) -> str:
    """Return the command of LaTeX for the sign of a fraction, such as `½`."""
    numerator, denominator = unicodedata.normalize("NFKC", sign).split("\N{FRACTION SLASH}")
    return f"\\frac{{{numerator}}}{{{denominator}}}"


_AS_LATEX = {
    **dict.fromkeys("−–‒‑‐﹣－", "-"),
    **dict.fromkeys("⁄∕", "/"),
    **dict.fromkeys("·⋅∙", "\\cdot "),
    **{sign: f"\\{name} " for sign, name in zip(_COMMANDS[0], _COMMANDS[1].split(), strict=True)},
    **{sign: _as_fraction(sign) for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"},
    **{letter: f"\\mathbb{{{plain}}}" for letter, plain in zip("ℝℤℚℕℂ", "RZQNC", strict=True)},
    "°": "^\\circ ",
    **dict.fromkeys("✓✔✅", MARK),
    **dict.fromkeys("\u00a0\u2009\u202f", " "),
    **dict(zip("０１２３４５６７８９＋＝（）．，：％", "0123456789+=().,:%", strict=True)),
}
_SIGNS = str.maketrans(_AS_LATEX)
_SUPERSCRIPTS = ("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_POWER = re.compile(f"(?!¹(?![{_SUPERSCRIPTS[0]}]))[{_SUPERSCRIPTS[0]}]+")  # a single ¹ is the sign of a footnote
_AS_POWER = str.maketrans(*_SUPERSCRIPTS)
_ROOT = re.compile(r"√ ?(?:([0-9]+|[a-zA-Z])|\{([^{}]*)\}|\(([^()]*)\))")
_SYNONYMS = (
    (re.compile(r"\\ne(?![a-zA-Z])"), r"\\neq"),
    (re.compile(r"(?<![\^{])\\degree(?![a-zA-Z])"), r"^\\circ "),
    (re.compile(r"(\^\{? ?\\circ ?\}?) ?(?:\\(?:text|mathrm)\{ ?[C] ?\}|C$)"), r"\1\\text{ celsius}"),
    (re.compile(r"(\^\{? ?\\circ ?\}?) ?(?:\\(?:text|mathrm)\{ ?[F] ?\}|F$)"), r"\1\\text{ fahrenheit}"),
)
_QUOTES = dict(zip("`\"'“‘", "`\"'”’", strict=True))
_FORMULA = re.compile(r"(\\\\)|\\\((.*?)\\\)|\\\[(.*?)\\\]", re.DOTALL)
_DOLLAR = re.compile(r"(?<!\\)\$")
_MARKS = re.compile(f"([0-9.]\\}}*)?([ {MARK}]*{MARK}[ {MARK}]*)(?=(\\{{*[0-9.])?)")


def with_latex_signs(text: str) -> str:
    """Return an answer with the commands of LaTeX instead of other signs."""
    text = _ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2] or root[3]}}}", text)
    text = _POWER.sub(lambda power: f"^{{{power[0].translate(_AS_POWER)}}}", text)
    text = text.translate(_SIGNS)
    for pattern, command in _SYNONYMS:
        text = pattern.sub(command, text)
    return text


def without_delimiters(text: str) -> str:
    r"""Return an answer with marks for pairs of quotation marks around it, and of `\(...\)`, `\[...\]` and `$`."""
    inner = text.strip()
    while len(inner) > 1 and _QUOTES.get(inner[0]) == inner[-1] and inner.count(inner[-1]) <= 2:
        inner = inner[1:-1].strip()
    return _DOLLAR.sub(MARK, _FORMULA.sub(_undelimited, inner))


def _undelimited(formula: re.Match[str]) -> str:
    """Return the content of a formula between two marks; a double backslash, which begins none, stays."""
    return formula[1] or f"{MARK}{formula[2] or formula[3] or ''}{MARK}"


def without_marks(text: str) -> str:
    """Return an answer with a blank for each mark, and with `MARK` for marks between digits."""
    return _MARKS.sub(_plain_mark, text).strip()


def _plain_mark(marks: re.Match[str]) -> str:
    before = marks[1] or ""
    is_between_digits = before and marks[3]
    return before + (MARK if is_between_digits else " ")
