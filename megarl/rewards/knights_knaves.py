"""Knights and knaves: find the persons who always tell the truth and those who always lie.

The ground truth is `{names, is_knight}`, two lists of the same length. A response must give every person one role, in
sentences that state roles and nothing else: a sentence with a condition, a negation or a reason states none.
"""

import re
from collections.abc import Mapping
from typing import Any

from megarl.rewards.tags import answer_of

CORRECT = 1.0
WELL_FORMED = 0.1
"""Score of an answer in its tags that gives every person one role, but not all the correct roles."""

_MARKUP = str.maketrans("", "", "*_`#\"'$")
_SENTENCES = re.compile(r"[.;!\n]")
_CLAUSES = re.compile(r",|&| and | while | but |(?<= )(?=\([0-9]{1,3}\))")
_CLAIM = re.compile(
    r"(?:(?:so|thus|hence|therefore|finally|and|while|but|(?:the |my )?(?:final )?answer(?: is)?)(?: ?: ?| |$))?"
    r"(?:- )?(?:\(?[0-9]{1,3}\) ?)?(?:([^\W\d_]+) is (?:an? |the )?(knight|knave))?",
    re.IGNORECASE,
)
"""A clause: perhaps an opening word, perhaps a number, perhaps the role of a person."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> float:
    """Score the last `<answer>...</answer>` of a response; without tags, its last line that is not empty."""
    words, tagged = answer_of(solution_str)
    truth = {
        name.lower(): bool(knight)
        for name, knight in zip(ground_truth["names"], ground_truth["is_knight"], strict=True)
    }
    found = _roles(words)
    if found == set(truth.items()):
        return CORRECT
    well_formed = tagged and len(found) == len(truth) and {name for name, _ in found} == set(truth)
    return WELL_FORMED if well_formed else 0.0


def answer_in(text: str) -> str:
    """Return the roles that are scored, in the order of the names; '' if there are none."""
    words, _ = answer_of(text)
    return ", ".join(f"{name} is a {'knight' if knight else 'knave'}" for name, knight in sorted(_roles(words)))


def _roles(words: str) -> set[tuple[str, bool]]:
    """Return the roles that sentences state: lower-case names, and whether they are knights."""
    return {role for sentence in _SENTENCES.split(words.translate(_MARKUP)) for role in _claimed(sentence)}


def _claimed(sentence: str) -> list[tuple[str, bool]]:
    clauses = [_CLAIM.fullmatch(clause.strip()) for clause in _CLAUSES.split(" ".join(sentence.split()))]
    if None in clauses:
        return []
    return [(clause[1].lower(), clause[2].lower() == "knight") for clause in clauses if clause and clause[1]]
