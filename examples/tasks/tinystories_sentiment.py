"""Preference pairs from stories: the more cheerful (VADER) of two passages of a story is preferred."""

import random
import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from megarl.data.prepare.files import problems_of
from megarl.data.prepare.options import option
from megarl.data.prepare.preferences import hold_out
from megarl.platform.errors import UserError

_SENTENCE = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["']))\s+""")


OPTIONS = (
    option(
        "--from source",
        "jsonl or parquet file with a story as `text` per row",
        type=click.Path(path_type=Path),
        required=True,
    ),
    option("--stories", "most stories that are read", type=int),
    option("--val", "held-out pairs; no story is in both splits", default=256),
    option("--pairs", "most pairs of one story", default=6),
    option("--words", "words of a passage, which starts with a sentence", default=25),
    option("--gap", "least difference of a pair's scores, from 0 to 2", default=0.5),
    option("--seed", default=1),
)


def build(arguments: SimpleNamespace) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of `train` and `val`. Raises UserError if the file is missing or has too few stories."""
    score = _sentiment()
    rows = []
    for index, problem in islice(problems_of(arguments.source), arguments.stories):
        if not isinstance(problem.get("text"), str):
            raise UserError(f"{arguments.source}, row {index}: a story is an object with its `text`")
        opening, passages = cut(problem["text"], arguments.words)
        chosen_pairs = pairs(passages, score, gap=arguments.gap)
        random.Random(f"{arguments.seed} {index}").shuffle(chosen_pairs)
        rows += [
            {"prompt": opening, "chosen": f" {chosen}", "rejected": f" {rejected}", "margin": margin, "story": index}
            for chosen, rejected, margin in chosen_pairs[: arguments.pairs]
        ]
    if not rows:
        raise UserError(f"{arguments.source} gives no pair: lower --gap or --words, or give more stories")
    return hold_out(rows, arguments.val, arguments.seed, [f"{row['story']:09}" for row in rows])


def cut(story: str, num_words: int) -> tuple[str, list[str]]:
    """Return the first sentence of a story, and passages of `num_words` words that start at each later sentence."""
    sentences = [sentence for sentence in _SENTENCE.split(story.strip()) if sentence]
    words = [sentence.split() for sentence in sentences[1:]]
    passages = []
    for start in range(len(words)):
        following = [word for sentence in words[start:] for word in sentence]
        if len(following) >= num_words:
            passages.append(" ".join(following[:num_words]))
    return (sentences or [""])[0], passages


def pairs(passages: Sequence[str], score: Callable[[str], float], *, gap: float) -> list[tuple[str, str, float]]:
    """Return all pairs of `passages` whose scores differ by `gap` or more, the better first, and the difference."""
    scored = [(score(passage), passage) for passage in passages]
    return [
        (better, worse, round(high - low, 4)) for high, better in scored for low, worse in scored if high - low >= gap
    ]


def _sentiment() -> Callable[[str], float]:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise UserError("the sentiment is VADER's: pip install vaderSentiment==3.3.2") from error
    analyzer = SentimentIntensityAnalyzer()
    return lambda text: float(analyzer.polarity_scores(text)["compound"])
