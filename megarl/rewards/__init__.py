"""Scores responses: the built-in rules, by data source, and the answer that each rule extracts from a response."""

from collections.abc import Callable
from typing import Any

from megarl.rewards import countdown, format, gsm8k, knights_knaves, math, multiply, reasoning_gym

REWARDS = {
    "countdown": countdown.compute_score,
    "countdown/bare": countdown.compute_score_bare,
    "format": format.compute_score,
    "gsm8k": gsm8k.compute_score,
    "gsm8k/flexible": gsm8k.compute_score_flexible,
    "knights_knaves": knights_knaves.compute_score,
    "math": math.compute_score,
    "math_dapo": math.compute_score_dapo,
    "multiply": multiply.compute_score,
    "openai/gsm8k": gsm8k.compute_score,
    "svamp": gsm8k.compute_score,
    "svamp/flexible": gsm8k.compute_score_flexible,
}

ANSWERS = {
    "countdown": countdown.answer_in,
    "countdown/bare": countdown.answer_in_bare,
    "gsm8k": gsm8k.answer_in,
    "gsm8k/flexible": gsm8k.answer_in_flexible,
    "knights_knaves": knights_knaves.answer_in,
    "math": math.answer_in,
    "math_dapo": math.answer_in_dapo,
    "multiply": multiply.answer_in,
    "openai/gsm8k": gsm8k.answer_in,
    "svamp": gsm8k.answer_in,
    "svamp/flexible": gsm8k.answer_in_flexible,
}
"""Functions text -> answer: equal for equivalent responses, '' for a response without one. `format` extracts none."""

RIGHT_ANSWERS: dict[str, Callable[[Any], str | None]] = {
    "countdown": countdown.right_answer,
    "countdown/bare": countdown.right_answer,
    "format": format.right_answer,
    "gsm8k": gsm8k.right_answer,
    "gsm8k/flexible": gsm8k.right_answer,
    "knights_knaves": knights_knaves.right_answer,
    "math": math.right_answer,
    "math_dapo": math.right_answer,
    "multiply": multiply.right_answer,
    "openai/gsm8k": gsm8k.right_answer,
    "svamp": gsm8k.right_answer,
    "svamp/flexible": gsm8k.right_answer,
}
"""Functions ground truth -> a response that the rule must score 1.0, or None if none is known.

They raise UserError if no response is right.
"""

SOURCES = {
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "Jiayi-Pan/Countdown-Tasks-3to4": "countdown",
    "lighteval/MATH": "math",
    "math_dapo_reasoning": "math_dapo",
    "numina_amc_aime": "math",
    "numina_aops_forum": "math",
    "numina_cn_k12": "math",
    "numina_olympiads": "math",
    "numina_synthetic_amc": "math",
    "numina_synthetic_math": "math",
}
"""The rule for further data sources, as files made for other trainers name them."""

PREFIXES = {
    "aime": "math_dapo",
    "arithmetic": "multiply",
    "countdown": "countdown",
    "multiply": "multiply",
    "yolo/arithmetic": "multiply",
    "yolo/multiply": "multiply",
}
"""The rule by the prefix of a data source; the names above have precedence."""


def rule_of(data_source: str) -> str | None:
    """Return the name in `REWARDS` of the rule for the rows of `data_source`; None if there is none."""
    if data_source in REWARDS:
        return data_source
    prefixes = (rule for prefix, rule in PREFIXES.items() if data_source.startswith(prefix))
    return SOURCES.get(data_source) or next(prefixes, None)


def reward_of(data_source: str) -> Callable[..., float] | None:
    """Return the reward for the rows of `data_source`; None if there is none."""
    if data_source.startswith(reasoning_gym.SOURCE_PREFIX):
        return reasoning_gym.compute_score
    return REWARDS.get(rule_of(data_source) or "")


def answers_of(data_source: str) -> Callable[[str], str] | None:
    """Return the function that extracts the answer from a response to `data_source`; None if the rule extracts none."""
    if data_source.startswith(reasoning_gym.SOURCE_PREFIX):
        return reasoning_gym.answer_in
    return ANSWERS.get(rule_of(data_source) or "")


def right_answer_of(data_source: str) -> Callable[[Any], str | None]:
    """Return the function that makes a right response from a ground truth. KeyError if there is no rule."""
    if data_source.startswith(reasoning_gym.SOURCE_PREFIX):
        return reasoning_gym.right_answer
    return RIGHT_ANSWERS[rule_of(data_source) or data_source]
