"""Countdown with a calculator: a turn is an expression to evaluate, or the answer.

The last `<answer>...</answer>` of a turn ends the episode and is scored as `countdown` scores it. Any other turn is
read as an expression, its last line that is not empty, and the environment says its value.
"""

from megarl.environments.protocol import Observation, Row, Step
from megarl.rewards.countdown import compute_score_bare, evaluate
from megarl.rewards.tags import answer_of

MAX_SHOWN = 32
"""Most characters of a value."""


class Calculator:
    """Evaluates expressions until the policy answers."""

    def __init__(self) -> None:
        """Begin without a problem; `reset` gives one."""
        self._row: Row | None = None

    def reset(self, row: Row) -> Observation:
        """Return the row's prompt."""
        self._row = row
        return row.prompt

    def step(self, response: str) -> Step:
        """Score an answer, or evaluate an expression."""
        assert self._row, "reset comes first"
        text, tagged = answer_of(response)
        if tagged:
            score = compute_score_bare(self._row.data_source, response, self._row.ground_truth, None)
            return Step(None, score, done=True)
        return Step(_value(text), 0.0, done=False)


def _value(expression: str) -> str:
    try:
        value, _ = evaluate(expression)
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
    except ValueError:  # also of an integer of too many digits
        return "= ?"
    return f"= {shown}" if len(shown) <= MAX_SHOWN else "= ?"
