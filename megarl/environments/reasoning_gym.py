"""A problem of reasoning-gym that the policy may try again: `megarl prepare reasoning-gym` writes the rows.

The task scores the `<answer>...</answer>` of each turn, from 0 to 1, as the reward `reasoning_gym/NAME` does. A turn
earns what its score exceeds the best score before, so an episode earns the best score of its turns.
"""

from megarl.environments.protocol import Observation, Row, Step
from megarl.platform.errors import UserError
from megarl.rewards.reasoning_gym import SOURCE_PREFIX, compute_score


class ReasoningGym:
    """Says whether an answer is right, until it is."""

    def __init__(self, *, right: float = 1.0, feedback: str = "This is wrong. Try again.") -> None:
        """Say `feedback` after each turn whose score is below `right`; a score of `right` ends the episode."""
        self._right = right
        self._feedback = feedback
        self._row: Row | None = None
        self._best = 0.0

    def reset(self, row: Row) -> Observation:
        """Return the row's prompt. UserError if the row is of no task of reasoning-gym."""
        if not row.data_source.startswith(SOURCE_PREFIX):
            raise UserError(f"the data source {row.data_source!r} is no task of reasoning-gym ({SOURCE_PREFIX}NAME)")
        self._row = row
        self._best = 0.0
        return row.prompt

    def step(self, response: str) -> Step:
        """Score the turn's answer."""
        row = self._row
        assert row, "reset comes first"
        score = compute_score(row.data_source, response, row.ground_truth, row.extra_info)
        earned = max(0.0, score - self._best)
        self._best = max(self._best, score)
        return Step(self._feedback, earned, done=score >= self._right)
