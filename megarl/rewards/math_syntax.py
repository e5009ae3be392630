r"""The syntax of an answer in LaTeX: operands with operators between them, and brackets that close.

Math-verify takes the last number of a text that it cannot parse: to it, `/ 42` and `[ 42` are 42.
"""

import re
from functools import lru_cache
from itertools import pairwise

from megarl.rewards.units import is_unit, is_unit_phrase, words_of

MAX_DEPTH = 30
"""Most brackets inside each other."""

_TOKEN = re.compile(
    r"\\text\{[^{}]*\}|\\mathbb\{[A-Z]\}|\\(?:begin|end)\{[^{}]*\}(?:\{[clr|]*\})?|\\[a-zA-Z]+|\\."
    r"|[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9])|[0-9]+(?:\.[0-9]+)?\.?"
    r"|\.[0-9]+|:=|[^\W\d_]+|\S",
    re.DOTALL,
)
_SKIPPED = words_of(r"\, \; \: \! \quad \qquad \limits ~") | {"\\ "}
_SIGNS = words_of(r"+ - \pm \mp")
_BINARY = _SIGNS | words_of(
    r"* / = < > : , ; \cdot \times \div \cup \cap \setminus \in \to \choose \mid \le \leq \leqslant \lt \ge \geq"
    r" \geqslant \gt \ne \neq \equiv \mod \bmod and or"
)
_CELLS = frozenset(["&", "\\\\"])
_CLOSING = {
    **dict.fromkeys("([", frozenset(")]")),
    "{": frozenset("}"),
    "\\{": frozenset(["\\}"]),
    "|": frozenset("|"),
    **{f"\\l{kind}": frozenset([f"\\r{kind}"]) for kind in ("floor", "ceil", "vert")},
    "\\vert": frozenset(["\\vert"]),
}
_CLOSERS = frozenset[str]().union(*_CLOSING.values())
_SIZES = ("\\left", "\\right")
_SIZED = (_CLOSING.keys() | _CLOSERS) - {"{", "}"}
"""The brackets whose size `\\left` and `\\right` set; the commands before them are left out."""
_NUM_ARGUMENTS = {**dict.fromkeys(words_of(r"\frac \dfrac \tfrac \cfrac \binom \dbinom \tbinom"), 2), "\\sqrt": 1}
_FUNCTIONS = words_of(
    r"\log \ln \lg \exp \sin \cos \tan \cot \sec \csc \arcsin \arccos \arctan \sinh \cosh \tanh \sum \prod \int \lim"
    r" \max \min \gcd sin cos tan cot sec csc log ln lg exp"
)
_POSTFIXES = words_of(r"! % \% \$ \degree '")
_DEGREES = frozenset(["\\circ", "\\degree"])
_AFTER_COMMAND = re.compile(r"(\\[a-zA-Z]+)\x1f(?=[a-zA-Z])")
_DEGREES_IN_BRACES = tuple(["{", degree, "}"] for degree in _DEGREES)
_NO_OPERANDS = _FUNCTIONS | _BINARY | _CLOSERS | _DEGREES | {*_SIZES}
_DIGIT = re.compile("[0-9]")
_CONJUNCTION = re.compile(r"\\text\{[, ]*(?:and|or)[, ]*\}")


class _MalformedError(Exception):
    """The text is no formula."""


@lru_cache(maxsize=4096)
def formula_of(latex: str, known: frozenset[str] = frozenset()) -> str | None:
    """Return a formula with braces around all arguments, without spaces and units; None if the text is no formula.

    A formula may be several with commas between them. Tokens in `known` may be operands.
    """
    if latex.strip() != latex.strip("~ "):  # a space connects; before a number it reads as `about`
        return None
    reader = _Reader(_TOKEN.findall(latex), known)
    try:
        reader.formula(depth=0)
    except _MalformedError:
        return None
    return None if reader.next else _AFTER_COMMAND.sub(r"\1 ", "\x1f".join(reader.read)).replace("\x1f", "")


class _Reader:
    """Reads by recursive descent.

    formula = term {operator term}; term = [sign] factor {factor}; factor = {function} operand {postfix}.
    """

    def __init__(self, tokens: list[str], known: frozenset[str]) -> None:
        visible = [token for token in tokens if token not in _SKIPPED]
        self._tokens = [
            token for token, after in pairwise([*visible, ""]) if token not in _SIZES or after not in _SIZED
        ]
        self._place = 0
        self._known = known
        self.read = list[str]()  # pieces of the formula

    @property
    def next(self) -> str:
        """The next token; '' at the end."""
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def formula(self, depth: int, *, has_cells: bool = False) -> None:
        """Read a formula. Raises _MalformedError if there is none."""
        if depth > MAX_DEPTH:
            raise _MalformedError
        self._term(depth)
        while self.next in _BINARY or _CONJUNCTION.fullmatch(self.next) or (has_cells and self.next in _CELLS):
            separator = self._take()
            is_empty_cell = separator in _CELLS and (self.next in _CELLS or self.next.startswith("\\end"))
            if not is_empty_cell:
                self._term(depth)

    def _term(self, depth: int) -> None:
        if self.next in _SIGNS:
            self._take()
        self._factor(depth)
        while self._begins_factor():
            before = self._tokens[self._place - 1]
            is_number = self.next[0] in ".0123456789" or (before[-1] == "." and self.next != "{")
            if is_number or "\\emptyset" in (self.next, before):
                raise _MalformedError  # no product ends in a number without a sign before it
            self._factor(depth)

    def _begins_factor(self) -> bool:
        token = self.next
        ends = token in _BINARY or token in _CELLS or token in _CLOSERS or token.startswith("\\end")
        return bool(token) and not ends and not _CONJUNCTION.fullmatch(token)

    def _factor(self, depth: int) -> None:
        while self.next in _FUNCTIONS:
            self._take()
            self._scripts(depth)
        self._operand(depth)
        self._scripts(depth)
        while self._is_unit(self.next) or self.next in _POSTFIXES:
            end = len(self.read)
            is_silent = self._is_word_of_unit(self.next)
            is_unit_before = self._take() not in _POSTFIXES
            if is_unit_before or self.next == "^":
                self._scripts(depth)
            if is_silent:  # math-verify would multiply its letters
                del self.read[end:]

    def _scripts(self, depth: int) -> None:
        """Read one power and one index at most; `^\\circ` is a power."""
        seen = set[str]()
        while self.next in ("^", "_") and self.next not in seen:
            seen.add(self._take())
            if self.next in _DEGREES:
                self._take()
            elif self._tokens[self._place : self._place + 3] in _DEGREES_IN_BRACES:
                for _ in range(3):
                    self._take()
            else:
                self._argument(depth)

    def _operand(self, depth: int) -> None:
        token = self._take()
        if token in _CLOSING:
            self._bracket(token, depth)
        elif token in _NUM_ARGUMENTS:
            if token == "\\sqrt" and self.next == "[":
                self._bracket(self._take(), depth)
            for _ in range(_NUM_ARGUMENTS[token]):
                self._argument(depth)
        elif token.startswith("\\begin"):
            self.formula(depth + 1, has_cells=True)
            if not self._take().startswith("\\end"):
                raise _MalformedError
        elif token == "\\$":
            if not self._take()[0].isdigit():
                raise _MalformedError
        elif token in self._known and token.startswith("\\"):
            if self.next == "{":
                self._argument(depth)
        elif self._is_unit(token) or not self._is_name_or_number(token):
            raise _MalformedError

    def _is_name_or_number(self, token: str) -> bool:
        if token in _NO_OPERANDS:
            return False
        is_command = token.startswith("\\") and token[1:].isalpha()
        return is_command or token.isalpha() or token.startswith(("\\text{", "\\mathbb{")) or bool(_DIGIT.search(token))

    def _is_unit(self, token: str) -> bool:
        """Return whether a token is a unit, which follows a number and never precedes one."""
        if token in self._known:
            return False
        if token.startswith("\\text{"):
            return bool(token[6:-1].strip()) and is_unit_phrase(token[6:-1].replace(".", " "))
        return len(token) > 1 and token.isalpha() and token not in (*_FUNCTIONS, *_BINARY) and is_unit(token)

    def _is_word_of_unit(self, token: str) -> bool:
        """Return whether a token is a unit in words, and cannot be a product such as `km`."""
        return self._is_unit(token) and (token.startswith("\\text{") or len(token) > 2)

    def _argument(self, depth: int) -> None:
        """Read what follows a command or `^`: braces, one digit, one letter or a command."""
        token = self.next
        if len(token) > 1 and token[0].isalnum():
            self._tokens[self._place : self._place + 1] = [token[0], token[1:]]
        if token == "{":
            self._operand(depth)
            return
        if token in _CLOSING or token.startswith("."):
            raise _MalformedError
        self.read.append("{")
        self._operand(depth)
        self.read.append("}")

    def _bracket(self, opening: str, depth: int) -> None:
        if opening == "\\{" and self.next == "\\}":  # the empty set
            self._take()
            return
        self.formula(depth + 1)
        if self._take() not in _CLOSING[opening]:
            raise _MalformedError

    def _take(self) -> str:
        token = self.next
        if not token:
            raise _MalformedError
        self._place += 1
        self.read.append(", " if token == "," else token)  # `58, 500` are two numbers
        return token
