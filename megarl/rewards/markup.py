r"""Markup around an answer and its parts: bold type, `$...$`, `\(...\)`, `\boxed{...}`, `\text{...}`.

Each mark of a pair becomes a `GAP`, so markup never joins its two sides: `1{8}` is not 18. A mark without its partner
remains in the text, and no grammar has a place for it.
"""

import re
from collections import Counter

GAP = "\x1f"
"""The character in place of a mark."""

_COMMAND = r"\\(?:boxed|fbox|mbox|emph|underline|text(?:bf|it|rm|sf)?|math(?:bf|rm|sf|it))\s*\{"
_TOKEN = re.compile(rf"{_COMMAND}|\\displaystyle(?![a-zA-Z])|\\.|\*{{1,3}}|_{{1,2}}|`+|\$\$?|[{{}}()\"'“”]", re.DOTALL)
_CLOSING = {"{": "}", "(": ")", "“": "”", "\\(": "\\)", "\\[": "\\]"}
_OPENING = {closing: opening for opening, closing in _CLOSING.items()}
_BESIDE_WORDS = frozenset("*_\"'`")
"""Marks that open before a word and close after one; inside a word they are signs of their own."""
_LITERAL = {"\\%": "%", "\\$": "$", "\\,": " ", "\\;": " ", "\\:": " ", "\\ ": " ", "\\!": GAP, "\\displaystyle": GAP}


def without_markup(text: str, *, parentheses: bool = False) -> str:
    r"""Replace both marks of each pair by a `GAP`, and `\%`, `\$` and spaces of LaTeX by their signs.

    `parentheses` makes `(...)` a pair as well. Takes linear time.
    """
    tokens = list(_TOKEN.finditer(text))
    replaced = [_LITERAL.get(token[0], token[0]) for token in tokens]
    opened = list[int]()
    is_open = Counter[str]()
    for place, token in enumerate(tokens):
        mark = "{" if token[0][-1] == "{" and token[0] != "\\{" else token[0]
        if mark in "()" and not parentheses:
            continue
        opening = _OPENING.get(mark, mark)
        if (
            is_open[opening]
            and mark not in _CLOSING
            and _may_close(text, token)
            and not _is_empty(tokens, opened, place)
        ):
            partner = _closed_by(opening, tokens, opened, is_open)
            replaced[partner] = replaced[place] = GAP
        elif mark not in _OPENING and token[0] not in _LITERAL and _may_open(text, token):
            opened.append(place)
            is_open[mark] += 1
    pieces = list[str]()
    end = 0
    for token, piece in zip(tokens, replaced, strict=True):
        pieces += [text[end : token.start()], piece]
        end = token.end()
    return "".join([*pieces, text[end:]])


def _closed_by(opening: str, tokens: list[re.Match[str]], opened: list[int], is_open: Counter[str]) -> int:
    """Return the place of the last open mark of a kind; marks that were opened after it have no partner."""
    while True:
        place = opened.pop()
        mark = "{" if tokens[place][0][-1] == "{" else tokens[place][0]
        is_open[mark] -= 1
        if mark == opening:
            return place


def _is_empty(tokens: list[re.Match[str]], opened: list[int], place: int) -> bool:
    """Return whether a mark beside words would close a pair around nothing: such marks surround no word."""
    last = tokens[opened[-1]]
    return last[0][0] in _BESIDE_WORDS and last[0] == tokens[place][0] and last.end() == tokens[place].start()


def _may_open(text: str, mark: re.Match[str]) -> bool:
    if mark[0][0] not in _BESIDE_WORDS:
        return True
    before, after = _beside(text, mark)
    follows_word = before.isalnum() or before == ")"
    return not follows_word and after.strip() != ""


def _may_close(text: str, mark: re.Match[str]) -> bool:
    if mark[0][0] not in _BESIDE_WORDS:
        return True
    before, after = _beside(text, mark)
    precedes_word = after.isalnum() or after == "("
    return not precedes_word and before.strip() != ""


def _beside(text: str, mark: re.Match[str]) -> tuple[str, str]:
    """Return the characters before and after a mark; '' at an end of the text."""
    return text[max(0, mark.start() - 1) : mark.start()], text[mark.end() : mark.end() + 1]
