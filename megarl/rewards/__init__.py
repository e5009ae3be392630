"""The rule-based rewards, by the data source of the row."""

from megarl.rewards import countdown, gsm8k

REWARDS = {
    "countdown": countdown.compute_score,
    "gsm8k": gsm8k.compute_score,
    "gsm8k/flexible": gsm8k.compute_score_flexible,
    "openai/gsm8k": gsm8k.compute_score,
}
