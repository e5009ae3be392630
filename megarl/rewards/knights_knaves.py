"""Knights and knaves: find the persons who always tell the truth and those who always lie.

The ground truth is `{names, is_knight}`, two lists of the same length. A response must give every person one role, in
sentences that state roles and nothing else. A sentence with a condition, a negation or a reason states none, and if it
names a person or a role, or denies something, no sentence of the answer counts.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from megarl.errors import UserError
from megarl.rewards.tags import answer_of

CORRECT = 1.0
WELL_FORMED = 0.1
"""Score of an answer in its tags that gives every person one role, but not all the correct roles."""

Roles = frozenset[tuple[str, bool]]
"""Lower-case names, and whether they are knights."""

_MARKUP = str.maketrans("’", "'", "*_`#\"'$")
_SENTENCES = re.compile(r"[.;!\n]")
_CLAUSES = re.compile(r",|&| and | while | but |(?<= )(?=\([0-9]{1,3}\))")
_CLAIM = (
    r"(?i:(?:so|thus|hence|therefore|finally|and|while|but|(?:the |my )?(?:final )?answer(?: is)?)(?: ?: ?| |$))?"
    r"(?:[-•] )?(?:\(?[0-9]{{1,3}}\) ?)?"
    r"(?:\|? ?({name})(?i: is (?:an? |the )?| ?[:=|–-]>? ?(?:an? )?| ?→ ?| \()(?i:(knight|knave))\)?(?: ?\|)?)?"
)
"""A clause: perhaps an opening word, perhaps a number, perhaps the role of a person in one of several forms."""
_ANY_NAME = r"[^\W_][\w-]*(?: [A-Z][\w-]*){0,2}"
_ROLE = re.compile(r"\b(?:knight|knave)s?\b", re.IGNORECASE)
_DENIAL = re.compile(
    r"\b(?:not|\w+nt|never|no|nor|neither|or|either|if|unless|otherwise|false|untrue|wrong|incorrect|mistaken|opposite"
    r"|contrary|reverse|inverse|converse|swap(?:ped)?|lies?|lying|liars?)\b|\?",
    re.IGNORECASE,
)
"""Words of a sentence that may take back what other sentences say; "isn't" has lost its apostrophe."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Score the last `<answer>...</answer>` of a response; without tags, its last line that is not empty.

    Raises UserError if the ground truth is no list of names with their roles, or no response could state a name.
    """
    names, truth = _read(ground_truth)
    words, tagged = answer_of(solution_str)
    found = _stated(words, names)
    if found == truth:
        return CORRECT
    well_formed = tagged and len(found) == len(truth) and {name for name, _ in found} == {name for name, _ in truth}
    return WELL_FORMED if well_formed else 0.0


def right_answer(ground_truth: Any) -> str:
    """Return a response that scores 1.0. Raises UserError as `compute_score` does."""
    _read(ground_truth)
    pairs = zip(ground_truth["names"], ground_truth["is_knight"], strict=True)
    return f"<answer>{_claims(tuple((str(name), bool(knight)) for name, knight in pairs))}</answer>"


def answer_in(text: str) -> str:
    """Return the roles that are scored, in the order of the names; '' if there are none."""
    words, _ = answer_of(text)
    return _claims(sorted(_stated(words, ())))


def _claims(roles: Sequence[tuple[str, bool]]) -> str:
    return ", ".join(f"{name} is a {'knight' if knight else 'knave'}" for name, knight in roles)


def _read(truth: Any) -> tuple[tuple[str, ...], Roles]:
    """Return the names as a response states them, and the roles. Raises UserError for anything else."""
    try:
        pairs = tuple(zip(truth["names"], truth["is_knight"], strict=True))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UserError(f"the ground truth {truth!r} is not {{names, is_knight}}, lists of the same length") from error
    if not pairs or any(not isinstance(name, str) for name, _ in pairs):
        raise UserError(f"the ground truth {truth!r} has no names, or a name that is no text")
    if any(not isinstance(knight, bool) and knight not in (0, 1) for _, knight in pairs):
        raise UserError(f"the ground truth {truth!r} has a role that is neither true nor false: write no texts")
    return _readable(tuple((name, bool(knight)) for name, knight in pairs))


@lru_cache(maxsize=4096)
def _readable(roles: tuple[tuple[str, bool], ...]) -> tuple[tuple[str, ...], Roles]:
    names = tuple(_plain(name) for name, _ in roles)
    wanted = frozenset((name.lower(), knight) for name, (_, knight) in zip(names, roles, strict=True))
    if _stated(_claims(roles), names) != wanted or len({name.lower() for name in names}) < len(roles):
        raise UserError(
            f"no response can state the roles of {', '.join(name for name, _ in roles)}: give each person another "
            "name, of letters, digits, hyphens and spaces"
        )
    return names, wanted


def _plain(text: str) -> str:
    return " ".join(text.translate(_MARKUP).split())


def _stated(words: str, names: tuple[str, ...]) -> Roles:
    """Return the roles that sentences state, of any names if `names` is empty; none if another sentence denies."""
    roles = set[tuple[str, bool]]()
    for sentence in _SENTENCES.split(words.translate(_MARKUP)):
        plain = " ".join(sentence.split())
        claimed = _claimed(plain, _claim_of(names))
        if claimed is None and _spoils(plain, names):
            return frozenset()
        roles.update(claimed or ())
    return frozenset(roles)


@lru_cache(maxsize=4096)
def _claim_of(names: tuple[str, ...]) -> re.Pattern[str]:
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(_CLAIM.format(name=f"(?i:{known})" if known else _ANY_NAME))


def _claimed(sentence: str, claim: re.Pattern[str]) -> list[tuple[str, bool]] | None:
    """Return the roles that a sentence states; None if it says anything else."""
    clauses = [claim.fullmatch(clause.strip()) for clause in _CLAUSES.split(sentence)]
    if None in clauses:
        return None
    return [(clause[1].lower(), clause[2].lower() == "knight") for clause in clauses if clause and clause[1]]


def _spoils(sentence: str, names: tuple[str, ...]) -> bool:
    """Return whether a sentence that states no role may take back what others state."""
    if _DENIAL.search(sentence):
        return True
    words = sentence.lower()
    is_heading = words.endswith(":")
    return any(name.lower() in words for name in names) or bool(_ROLE.search(sentence) and not is_heading)
