"""The rule-based rewards, by the data source of the row, and which answer each of them judges in a response."""

from collections.abc import Callable

from megarl.rewards import countdown, format, gsm8k, knights_knaves, math, multiply, reasoning_gym

REWARDS = {
    "countdown": countdown.compute_score,
    "format": format.compute_score,
    "gsm8k": gsm8k.compute_score,
    "gsm8k/flexible": gsm8k.compute_score_flexible,
    "knights_knaves": knights_knaves.compute_score,
    "math": math.compute_score,
    "multiply": multiply.compute_score,
    "openai/gsm8k": gsm8k.compute_score,
    "svamp": gsm8k.compute_score,
    "svamp/flexible": gsm8k.compute_score_flexible,
}

ANSWERS = {
    "countdown": countdown.answer_in,
    "gsm8k": gsm8k.answer_in,
    "gsm8k/flexible": gsm8k.answer_in_flexible,
    "knights_knaves": knights_knaves.answer_in,
    "math": math.answer_in,
    "multiply": multiply.answer_in,
    "openai/gsm8k": gsm8k.answer_in,
    "svamp": gsm8k.answer_in,
    "svamp/flexible": gsm8k.answer_in_flexible,
}
"""text -> answer: equal for responses that say the same, '' where there is none. `format` judges no answer."""


def reward_of(data_source: str) -> Callable[..., float] | None:
    """The reward of the rows of `data_source`, None where there is none."""
    if data_source.startswith(reasoning_gym.PREFIX):
        return reasoning_gym.compute_score
    return REWARDS.get(data_source)


def answers_of(data_source: str) -> Callable[[str], str] | None:
    """What finds the answer in a response to a row of `data_source`, None where its reward judges none."""
    if data_source.startswith(reasoning_gym.PREFIX):
        return reasoning_gym.answer_in
    return ANSWERS.get(data_source)
