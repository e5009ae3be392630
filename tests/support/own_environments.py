"""Environments of a user's own file: one that keeps its word, and others that do not."""

import functools
import itertools
import os
import time
from pathlib import Path
from typing import Any

from megarl.environments.protocol import Row, Step

CALLS = itertools.count()


class Count:
    """Says how many turns there were, until `last`. Rewards each turn with its number."""

    def __init__(self, last: int = 3) -> None:
        self._last, self._turns = last, 0

    def reset(self, row: Row) -> str:
        return f"row {row.index} begins"

    def step(self, response: str) -> Step:
        self._turns += 1
        return Step(f"{self._turns}:{response}", float(self._turns), done=self._turns == self._last)


class Repeats(Count):
    """Begins with the prompt of the row."""

    def reset(self, row: Row) -> Any:
        return row.prompt


class Dies(Count):
    """Loses its process once, at a turn that asks for it."""

    def step(self, response: str) -> Step:
        mark = response.removeprefix("die ")
        if mark != response and not Path(mark).exists():
            Path(mark).touch()
            os._exit(3)
        return super().step(response)


def with_time(step: Any) -> Any:
    """Give a method the time as a further argument."""

    @functools.wraps(step)
    def timed(self: Any, response: str) -> Step:
        return step(self, response, time.monotonic())

    return timed


class Timed(Count):
    """Has a method whose decorator passes a further argument."""

    @with_time
    def step(self, response: str, clock: float) -> Step:
        return super().step(response)


class Slow(Count):
    """Takes 0.4 seconds for a turn."""

    def step(self, response: str) -> Step:
        time.sleep(0.4)
        return super().step(response)


class Hangs(Count):
    def step(self, response: str) -> Step:
        if response == "hang":
            time.sleep(600)
        return super().step(response)


class Fickle(Count):
    """Answers otherwise every time."""

    def step(self, response: str) -> Step:
        return Step(f"{os.getpid()} {next(CALLS)}", 0.0, done=False)


class Says:
    """Answers with what it was given."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def reset(self, row: Row) -> str:
        return "begin"

    def step(self, response: str) -> Any:
        return self._answer


class Mute:
    def reset(self, row: Row) -> str:
        return ""


class Silent(Count):
    """Begins with nothing."""

    def reset(self, row: Row) -> str:
        return ""


class Busy(Count):
    """Fails to begin episodes of odd rows, and at first those of all rows, also when it is made."""

    def __init__(self, failures: int = 2) -> None:
        super().__init__()
        number = next(CALLS)
        if number == 0:
            raise OSError("the simulator is away")
        self._fails = number < failures

    def reset(self, row: Row) -> str:
        if self._fails or row.index % 2:
            raise OSError("the simulator is busy")
        return super().reset(row)


class Digits:
    """Rewards the digits of a turn, and asks for more until there are `enough`. Adds `words` to a prompt."""

    def __init__(self, enough: int = 3, words: str = "") -> None:
        self._enough, self._found, self._words = enough, 0, words

    def reset(self, row: Row) -> Any:
        return f"{row.prompt}{self._words}" if self._words else row.prompt

    def step(self, response: str) -> Step:
        digits = sum(character.isdigit() for character in response)
        self._found += digits
        return Step(f" {self._found} :", digits / 10, done=self._found >= self._enough)


class Wordy(Count):
    """Says so many `words` at the start and after a turn. Rewards the digits of a turn."""

    def __init__(self, words: int) -> None:
        super().__init__(last=2)
        self._words = " seven" * words

    def reset(self, row: Row) -> str:
        return f"{row.index}{self._words}"

    def step(self, response: str) -> Step:
        _, _, done = super().step(response)
        return Step(self._words, sum(character.isdigit() for character in response) / 10, done)


class Gymlike:
    """Begins without a row."""

    def reset(self) -> str:
        """Return a prompt."""
        return "?"

    def step(self, response: str) -> tuple[str, float, bool]:
        """End the episode."""
        return "", 0.0, True


class Impatient:
    """Wants to know the time."""

    def reset(self, row: Row) -> str:
        """Return a prompt."""
        return "?"

    def step(self, response: str, clock: float) -> tuple[str, float, bool]:
        """End the episode."""
        return "", clock, True
