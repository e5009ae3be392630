"""A custom reward: how positive a text is, by VADER (Hutto & Gilbert 2014). Needs `pip install vaderSentiment==3.3.2`.

custom_reward_function: {path: examples/rewards/sentiment.py}
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer


@cache
def _analyzer() -> SentimentIntensityAnalyzer:
    return SentimentIntensityAnalyzer()


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """The compound score of the response alone, from -1 (most negative) to 1 (most positive)."""
    return float(_analyzer().polarity_scores(solution_str)["compound"])
