"""Guess a number: the environment says whether the number is higher or lower. The ground truth is the number."""

import re

from megarl.environments.protocol import Observation, Row, Step

_NUMBER = re.compile("[0-9]+")
MAX_DIGITS = 18


class Guess:
    """The first number of a response is the guess."""

    def __init__(self, *, right: float = 1.0, wrong: float = 0.0) -> None:
        """Reward the right guess with `right`, and every other turn with `wrong`."""
        self._right = right
        self._wrong = wrong
        self._number = 0

    def reset(self, row: Row) -> Observation:
        """Return the row's prompt. UserError if its ground truth is no whole number."""
        self._number = int(row.ground_truth)
        return row.prompt

    def step(self, response: str) -> Step:
        """Compare the guess with the number."""
        found = _NUMBER.search(response)
        if found is None or len(found[0]) > MAX_DIGITS:
            return Step("?", self._wrong, done=False)
        guess = int(found[0])
        if guess == self._number:
            return Step(None, self._right, done=True)
        return Step("higher" if guess < self._number else "lower", self._wrong, done=False)
