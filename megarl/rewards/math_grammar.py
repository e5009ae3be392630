r"""The parts of an answer in LaTeX: signs, commands and words of closed lists, and those of its ground truth.

Math-verify leaves out commands and words that it does not know: to it, `\forall 5` and `5\text{ is wrong}` are 5.
"""

import re
from functools import lru_cache

from megarl.rewards.math_syntax import formula_of
from megarl.rewards.units import is_name as is_name_in_words
from megarl.rewards.units import is_unit, is_unit_phrase, words_of

_COMMANDS = words_of("""
    frac dfrac tfrac cfrac sqrt pi infty cdot times div pm mp in cup cap setminus
    emptyset log ln lg exp sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh binom dbinom tbinom choose
    lfloor rfloor lceil rceil lvert rvert vert circ degree left right quad qquad sum prod int lim
    """)
_NEEDS_INDEX = frozenset(["sum", "prod", "int", "lim"])
_ENVIRONMENTS = words_of(
    "matrix pmatrix bmatrix vmatrix Bmatrix Vmatrix smallmatrix array cases aligned align align* gathered split"
)
_FUNCTIONS = words_of("sin cos tan cot sec csc log ln lg exp arcsin arccos arctan")
_CONSTANTS = frozenset("ei")
_TOKEN = re.compile(
    r"\\text\{(?P<words>[^{}]*)\}|\\mathbb\{[CNQRZ]\}|\\(?:begin|end)\{(?P<environment>[^{}]*)\}"
    r"|\\(?P<command>[a-zA-Z]+)(?P<index>(?:\\limits)? ?_)?|\\(?P<escaped>.)|(?P<letters>[^\W\d_]+)|\s+|(?P<sign>.)",
    re.DOTALL,
)
_LIMIT = re.compile(r"(?<=\\lim_\{)([^{}]*)\\to(?![a-z])")
_SIGNS = frozenset("0123456789.,;+-*/^=()[]{}|!%&$~")
_ESCAPED = frozenset("%${}|\\,;:! ")
_REPEATING = re.compile(r"(?<=[0-9.])\\(?:overline|bar|dot)(?=\{?[0-9])")
_RELATIONS = words_of(r"< > \le \leq \leqslant \lt \ge \geq \geqslant \gt")
_SETS = re.compile(r"[<>]|\\[lg](?:e|t|eq|eqslant)(?![a-z])|[(\[].*,.*[)\]]")
"""A truth that an answer may state by `<` and the like: an inequality or an interval."""
_RUN = re.compile(r"[^\W\d_]+|[^\s\w]|[0-9]+")
_CONJUNCTION = re.compile(r"[, ]*(?:and|or)?[, ]*")

_LABEL = re.compile(r"[a-zA-Z]+ *: *(?![a-zA-Z: ])")
"""A name before a colon, as in `x: 12`; `a:b` is a ratio."""
_USUAL_LETTERS = re.compile(
    r"[A-Z]{2,6}|[a-dhkmnp-z]{2,4}|sin|cos|tan|cot|sec|csc|log|ln|lg|exp|gcd|lcm|mod|max|min|and|or|per|th|st|nd|rd|[ap]m"
    r"|January|February|March|April|May|June|July|August|September|October|November|December"
)

_GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|varphi"
    "|chi|psi|omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega|ell"
)
_LETTERS = rf"(?:[A-Z]{{1,6}}|[a-z]|[abcd]{{2,4}}|[xyzw]{{2,4}}|[mnk]{{2}}|[pqrst]{{2,4}}|\\(?:{_GREEK})(?![a-zA-Z]))"
_EXTREME = r"(?:\\text\{(?:max|min|total)\}|max|min|total)"
_INDEX = rf"_(?:[0-9a-zA-Z]|\{{(?:{_LETTERS}|[0-9]+|[a-z][-+][0-9]+|\\triangle ?[A-Z]+|{_EXTREME})\}})"
_ARGUMENT = r"(?:\\left)?\((?:[^()a-z\\]|\\[a-z]+|(?<![a-z])[a-z](?![a-z]))*(?:\\right)?\)"
_FUNCTION = (
    r"(?:\\(?:angle|measuredangle|triangle|max|min|gcd|det|deg|Pr|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan)(?![a-zA-Z])"
    r"|m(?=\\angle)|\\text\{(?:lcm|area|Area)\})"
)
_DECORATED = rf"\\(?:overline|overrightarrow|vec|hat|bar|mathbf)\{{?{_LETTERS}\}}?"
_CORE = rf"(?:{_LETTERS}|{_DECORATED})'{{0,2}}(?: ?{_INDEX})?(?: ?{_ARGUMENT})?"
_NAME = re.compile(
    rf"(?:{_FUNCTION} ?)*{_CORE}|{_FUNCTION} ?{_ARGUMENT}|\|{_CORE}\||\[{_CORE}\]|\({_LETTERS}(?:, ?{_LETTERS})+\)"
)
"""The names that a side of an equation may be: `x`, `a_{10}`, `f(3)`, `\\angle ABC`, `|AB|`, `(x, y)`."""


def is_name(side: str) -> bool:
    """Return whether a side of an equation names a value, and has none of its own."""
    words = re.sub(r"\\text\{([^{}]*)\}", r"\1", side).strip(" $")
    return bool(_NAME.fullmatch(side.strip(" $"))) or is_name_in_words(words)


def derives(answer: str, truth: str) -> bool:
    """Return whether every part of an answer is mathematics, a unit, or a part of the ground truth as well.

    Letters, Greek letters included, are those of the truth, in the same case.
    """
    known = _vocabulary(truth)
    if formula_of(answer, known) is None and formula_of(truth, known) is not None:
        return False
    return all(_is_known(token, known) for token in _TOKEN.finditer(_REPEATING.sub("", _LIMIT.sub(r"\1", answer))))


def foreign_part(truth: str) -> str | None:
    """Return the first part of a ground truth that no usual answer has, such as a word in plain text; None if none.

    A truth is one line of mathematics. It may have any command, and any words in `\\text{...}`.
    """
    label = _LABEL.search(truth)
    if label:
        return repr(label[0])
    for token in _TOKEN.finditer(truth):
        sign = token["sign"]
        letters = token["letters"]
        is_usual_sign = sign is None or sign in _SIGNS or sign in "<>_':"
        is_usual_run = letters is None or len(letters) == 1 or _USUAL_LETTERS.fullmatch(letters) or is_unit(letters)
        if not (is_usual_sign and is_usual_run):
            return repr(token[0])
    return None


@lru_cache(maxsize=4096)
def _vocabulary(truth: str) -> frozenset[str]:
    """Return the commands, signs, letters and small words of a truth, and relations if it may be a set of numbers."""
    found = {*_RELATIONS} if _SETS.search(truth) else set[str]()
    for token in _TOKEN.finditer(truth):
        found.add(token[0])
        words = _RUN.findall(token["words"] or "")
        found.update(words, (word.lower() for word in words if len(word) > 1))
        if token["letters"]:
            found.update(token["letters"], [token["letters"].lower()] if len(token["letters"]) > 1 else [])
        if token["index"]:
            found.update((f"\\{token['command']}", "_"))
    return frozenset(found)


def _is_known(token: re.Match[str], known: frozenset[str]) -> bool:
    if token[0] in known or token[0].isspace() or token[0].startswith("\\mathbb{"):
        return True
    if token["words"] is not None:
        return _is_known_text(token["words"], known)
    if token["command"]:
        has_index = token["index"] is not None
        is_command = token["command"] in _COMMANDS and (has_index or token["command"] not in _NEEDS_INDEX)
        may_have_index = not has_index or token["command"] in (*_NEEDS_INDEX, "log")
        return (is_command or f"\\{token['command']}" in known) and (may_have_index or "_" in known)
    if token["letters"]:
        return _are_known_letters(token["letters"], known)
    return token["environment"] in _ENVIRONMENTS or token["escaped"] in _ESCAPED or token["sign"] in _SIGNS


def _are_known_letters(letters: str, known: frozenset[str]) -> bool:
    is_word = len(letters) > 1 and (letters in _FUNCTIONS or is_unit(letters) or letters.lower() in known)
    if is_word or letters in ("and", "or"):
        return True
    return all(letter in known or letter in _CONSTANTS for letter in letters)


def _is_known_text(text: str, known: frozenset[str]) -> bool:
    """Return whether words in `\\text{...}` are a unit, `and`, `or`, or words and signs of the truth."""
    if _CONJUNCTION.fullmatch(text) or is_unit_phrase(text.replace(".", " ").replace("~", " ")):
        return True
    words = _RUN.findall(text)
    return all(
        word in known
        or word in _SIGNS
        or word.isdigit()
        or word in ("and", "or")
        or (len(word) > 1 and word.lower() in known)
        for word in words
    )
