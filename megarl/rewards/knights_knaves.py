"""Knights and knaves: find the persons who always tell the truth and those who always lie.

The ground truth is `{names, is_knight}`, two lists of the same length. A response must give every person one role. Its
answer is the content of its last tags, or its last line. A grammar derives it: perhaps an opening such as `The answer
is:`, then statements of roles with joining words between them. An answer with anything else states no role.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from megarl.platform.errors import UserError
from megarl.rewards.markup import GAP, without_markup
from megarl.rewards.tags import answer_of

CORRECT = 1.0
WELL_FORMED = 0.1
"""Score of an answer in its tags that gives every person one role, but not all the correct roles."""

Roles = frozenset[tuple[str, bool]]
"""Lower-case names, and whether they are knights."""

_APOSTROPHE = str.maketrans("’", "'")
_JOINING = ("and", "while", "whereas", "but", "so", "thus", "hence", "therefore", "finally")
_JOINS = rf"(?:(?:{'|'.join(_JOINING)}|&)(?:,? |(?=\n)))"
_NUMBERED = r"(?:\(?[0-9]{1,3}[).] ?|[-*•] )"
_OPENING = re.compile(
    rf"{_JOINS}?(?:(?:the |my )?(?:final )?(?:answer|solution|conclusion|roles)(?: ?:| (?:is|are)(?: ?:)?)[ \n])?"
    r"(?:\|? ?(?:name|person|inhabitant) ?\| ?(?:role|type) ?\|?\n\|?[-:| ]+\n)?",
    re.IGNORECASE,
)
"""The opening of an answer: a joining word, `The answer is:`, the head of a table."""
_PUNCTUATION = rf"(?: ?[.,;!]?\n| ?[.,;!] ?| (?={_JOINS}|{_NUMBERED}))"
_OPENINGS = (re.compile(""), _OPENING)
_SEPARATORS = (re.compile(_PUNCTUATION, re.IGNORECASE), re.compile(f"{_PUNCTUATION}{_JOINS}", re.IGNORECASE))
"""Patterns before the first statement, and before another: first without words, which may be the name of a person."""
_BEFORE_NAME = rf"{_NUMBERED}?(?:\| ?)?"
_AFTER_NAME = (
    r"(?: is (?:an? |the )?| ?(?:[:=|–—→-]|[-=]>) ?(?:an? |the )?| ?(\( ?))(knight|knave)\b(?(2) ?\))(?: ?\|)?"
)
"""The role of a person, in one of several forms: `is a`, `:`, `=`, `->`, parentheses, a row of a table."""
_END = re.compile(r" ?[.!]?")
_ANY_NAME = r"[^\W_][\w'-]*(?: (?-i:[^\W\d_a-z])[\w'-]*){0,2}"
_NAME = re.compile(r"[^\W_][\w'-]*(?: [\w'-]+){0,3}")


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None
) -> float:
    """Score the last `<answer>...</answer>` of a response; without tags, its last line that is not empty.

    Raises UserError if the ground truth is no list of names with their roles, or no response could state a name.
    """
    names, truth = _readable(_pairs(ground_truth))
    words, tagged = answer_of(solution_str)
    found = _stated(words, names)
    if found == truth:
        return CORRECT
    has_all_names = {name for name, _ in found} == {name for name, _ in truth}
    return WELL_FORMED if tagged and has_all_names and len(found) == len(truth) else 0.0


def right_answer(ground_truth: object) -> str:
    """Return a response that scores 1.0. Raises UserError as `compute_score` does."""
    pairs = _pairs(ground_truth)
    _readable(pairs)
    return f"<answer>{_claims(pairs)}</answer>"


def answer_in(text: str) -> str:
    """Return the roles that are scored, in the order of the names; '' if there are none."""
    words, _ = answer_of(text)
    return _claims(sorted(_stated(words, ())))


def _claims(roles: Sequence[tuple[str, bool]]) -> str:
    return ", ".join(f"{name} is a {'knight' if knight else 'knave'}" for name, knight in roles)


def _pairs(truth: Any) -> tuple[tuple[str, bool], ...]:
    """Return each name with whether it is a knight's. Raises UserError for anything else."""
    try:
        names = truth["names"]
        knights = truth["is_knight"]
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"the ground truth {truth!r} is not {{names, is_knight}}") from error
    are_lists = isinstance(names, list | tuple) and isinstance(knights, list | tuple)
    if not are_lists or len(names) != len(knights):
        raise UserError(f"the ground truth {truth!r} has other names or roles than two lists of the same length")
    if not names or any(not isinstance(name, str) for name in names):
        raise UserError(f"the ground truth {truth!r} has no names, or a name that is no text")
    if any(not isinstance(knight, bool) and knight not in (0, 1) for knight in knights):
        raise UserError(f"the ground truth {truth!r} has a role that is neither true nor false: write no texts")
    return tuple((name, bool(knight)) for name, knight in zip(names, knights, strict=True))


@lru_cache(maxsize=4096)
def _readable(roles: tuple[tuple[str, bool], ...]) -> tuple[tuple[str, ...], Roles]:
    """Return the names as a response states them, and the roles. Raises UserError if no response can state them."""
    names = tuple(" ".join(name.translate(_APOSTROPHE).split()) for name, _ in roles)
    small = [name.lower() for name in names]
    truth = frozenset((name, knight) for name, (_, knight) in zip(small, roles, strict=True))
    if not all(map(_NAME.fullmatch, small)) or len(set(small)) < len(roles) or _stated(_claims(roles), names) != truth:
        raise UserError(
            f"no response can state the roles of {', '.join(name for name, _ in roles)}: give each person another "
            "name, of letters, digits, hyphens and spaces"
        )
    return names, truth


def _stated(words: str, names: tuple[str, ...]) -> Roles:
    """Return the roles that an answer states, of any names if `names` is empty; none if it is not derived."""
    plain = without_markup(words.translate(_APOSTROPHE)).replace(GAP, " ")
    lines = (" ".join(line.split()) for line in plain.splitlines())
    text = "\n".join(line for line in lines if line)
    statement = _statement_of(names)
    roles = set[tuple[str, bool]]()
    found = _next(text, 0, _OPENINGS, statement)
    while found is not None:
        roles.add((found[1].lower(), found[3].lower() == "knight"))
        if _END.fullmatch(text, found.end()):
            return frozenset(roles)
        found = _next(text, found.end(), _SEPARATORS, statement)
    return frozenset()


def _next(text: str, start: int, before: Sequence[re.Pattern[str]], statement: re.Pattern[str]) -> re.Match[str] | None:
    """Return the statement behind the first of `before` that a statement follows; None if there is none."""
    for pattern in before:
        opening = pattern.match(text, start)
        found = statement.match(text, opening.end()) if opening else None
        if found:
            return found
    return None


@lru_cache(maxsize=4096)
def _statement_of(names: tuple[str, ...]) -> re.Pattern[str]:
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(f"{_BEFORE_NAME}({known or _ANY_NAME}){_AFTER_NAME}", re.IGNORECASE)
