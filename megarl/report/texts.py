"""Collapse, repetition and growth of the validation samples of a run. Pure functions.

A reward may pay a policy for texts that nobody wants, and then its curve rises.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean

from megarl.report.read import Run
from megarl.tracking.protocol import Row

FEWEST = 4
"""Different prompts without which nothing is concluded."""
ONE_TEXT = 0.5
REPETITIVE = 0.3
LONGER = 2.0
_WORDS = 8  # of a text that can be called repetitive
_DISTINCT = 0.25
_SIGNS = 12  # of a text of few words that can be called repetitive, as `!!!!!!!!!!!!` and `haha...`
_SIGN_PAIRS = 2
_SHOWN = 60


def text_notes(run: Run) -> Iterator[str]:
    """Yield a sentence for each way in which the latest validation texts look like no answers."""
    if not run.samples:
        return
    first = run.samples[min(run.samples)]
    last = run.samples[max(run.samples)]
    if len({row["prompt"] for row in last}) < FEWEST:
        return
    share, text = _most_common(last)
    if share >= ONE_TEXT and share > 2 * _most_common(first)[0]:
        yield f"{share:.0%} of the latest validation responses are the same text, {text!r}, whatever the prompt."
    repetitive = _share_of_repetitive(last)
    if repetitive >= REPETITIVE and repetitive > 2 * _share_of_repetitive(first):
        yield f"{repetitive:.0%} of the latest validation responses repeat a few words over and over."
    before = fmean(len(row["response"]) for row in first)
    now = fmean(len(row["response"]) for row in last)
    if before and now >= LONGER * before and not _is_paid_less(first, last):
        yield f"The validation responses are {now / before:.1f} times as long as at first: does the reward pay length?"


def is_repetitive(text: str) -> bool:
    """Return whether a text of at least 8 words has few different ones, alone and in pairs, or few pairs of signs."""
    words = text.split()
    if len(words) < _WORDS:
        return len(text) >= _SIGNS and len(set(pairwise(text))) <= _SIGN_PAIRS
    pairs = set(pairwise(words))
    return len({*words}) <= _DISTINCT * len(words) and len(pairs) <= 2 * _DISTINCT * len(words)


def _most_common(rows: Sequence[Row]) -> tuple[float, str]:
    """Return the share of prompts whose response is the most common text, and the beginning of that text."""
    answers = {(row["prompt"], row["response"].strip()) for row in rows}
    ((text, number),) = Counter(response for _, response in answers).most_common(1)
    return number / len({row["prompt"] for row in rows}), text[:_SHOWN]


def _share_of_repetitive(rows: Sequence[Row]) -> float:
    return fmean(is_repetitive(row["response"]) for row in rows)


def _is_paid_less(first: Sequence[Row], last: Sequence[Row]) -> bool:
    """Return whether the later texts have no higher score, so that their length is not what was paid."""
    before = fmean(row["score"] or 0.0 for row in first)
    now = fmean(row["score"] or 0.0 for row in last)
    return now <= before
