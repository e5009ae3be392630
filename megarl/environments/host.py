"""Loads an environment and plays episodes with it, in a worker of `megarl.sandbox.supervisor`: no torch here.

A worker may be killed at any time, and with it the episodes that it held. So each request has the whole history of its
episode. A worker that does not know the episode plays it again up to the last turn, and compares the observations.
"""

import inspect
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

from megarl.data.messages import prompt_faults, shown
from megarl.environments.protocol import Environment, Observation, Row, Step
from megarl.platform.custom_code import place_of
from megarl.platform.errors import UserError
from megarl.platform.functions import load_module
from megarl.rewards.calls import OneByOne
from megarl.sandbox.protocol import GroupReward
from megarl.sandbox.results import RuleResult, is_number

BUILT_IN: Mapping[str, str] = {
    "openenv": "OpenEnv",
    "python": "Python",
    "reasoning_gym": "ReasoningGym",
}
"""Name of an environment, which is a module of this package -> its class."""
NUM_RESETS = 3
"""Most resets of an episode; each has an instance of its own."""
FIRST_WAIT_S = 0.2
"""Seconds before the second reset; each later wait is twice as long."""
MAX_KEPT = 1024
"""Most episodes that a worker keeps for their next turn; another is played again."""
DONE = "done"
EPISODE = ("data_source", "row", "episode", "responses", "observations")
"""The arguments of a request, which `Players.answer` explains."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """The environment that a configuration names."""

    section: ClassVar[str] = "environment"
    supervisor: ClassVar[str] = "megarl.environments.supervisor"

    name: str
    path: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> GroupReward:
        """Return the function that answers requests. Raises UserError if the environment cannot be made."""
        make = self._built_in() if self.path is None else self._own(Path(self.path))
        try:
            inspect.signature(make).bind(**self.kwargs)
        except TypeError as error:
            raise UserError(f"environment.kwargs: {self.name} does not take them: {error}") from error
        return OneByOne(Players(partial(make, **self.kwargs)).answer, EPISODE)

    def warm_up(self, data_source: str) -> None:
        """Do nothing: an environment imports what it needs when it is loaded."""

    def canaries(self, sample: object) -> Sequence[object]:
        """Return nothing: an episode has a process and a state of its own."""
        return ()

    def _built_in(self) -> Callable[..., Environment]:
        if self.name not in BUILT_IN:
            known = ", ".join(BUILT_IN)
            raise UserError(
                f"environment.name: {self.name!r} is not built in ({known}): set environment.path to its file"
            )
        made: Callable[..., Environment] = getattr(
            import_module(f"megarl.environments.{self.name}"), BUILT_IN[self.name]
        )
        return made

    def _own(self, path: Path) -> Callable[..., Environment]:
        own = getattr(load_module(path, key="environment.path"), self.name, None)
        lacking = [name for name in ("reset", "step") if not callable(getattr(own, name, None))]
        if not isinstance(own, type) or lacking:
            raise UserError(
                f"environment.name: {path} has no class {self.name} with the methods reset(row) and step(response)"
            )
        for name, argument in (("reset", "row"), ("step", "response")):
            method = inspect.getattr_static(own, name, None)
            if not isinstance(method, FunctionType):
                continue
            try:
                inspect.signature(method, follow_wrapped=False).bind(own, argument)
            except TypeError as error:
                raise UserError(
                    f"environment.name: {path}: the call is {self.name}.{name}({argument}): {error}: define "
                    f"{name}(self, {argument})"
                ) from error
        return own


@dataclass
class _Playing:
    """An episode in progress."""

    environment: Environment
    observations: list[str | None] = field(default_factory=list)  # its answers so far, as JSON


class Players:
    """The episodes of a worker."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._playing = OrderedDict[str, _Playing]()

    def answer(
        self,
        *,
        data_source: str,
        row: Mapping[str, Any],
        episode: str,
        responses: Sequence[str],
        observations: Sequence[str],
    ) -> RuleResult:
        """Return the answer to the last of the `responses`, or the prompt of the episode if there is none.

        Args:
            data_source: of the row.
            row: the other fields of a `Row`.
            episode: names the episode.
            responses: all turns of the policy so far.
            observations: the answers to all turns but the last, as `pred` of earlier results.

        Returns:
            The reward as `score` and whether the episode is `done` as 0.0 or 1.0; the observation as JSON in `pred`.

        Raises:
            TypeError, UserError: the environment answers with something else than its protocol says.
            RuntimeError: it answered otherwise before.
        """
        start = Row(data_source=data_source, **row)
        playing = self._playing.pop(episode, None)
        if not responses:
            return RuleResult({"score": 0.0}, self._begin(start)[1])
        if playing is None or len(playing.observations) != len(observations):
            playing = _Playing(self._begin(start)[0])
            for response in responses[:-1]:
                _take_turn(playing, response)
        if playing.observations != [*observations]:
            raise RuntimeError("the environment is not deterministic: it answers a turn otherwise when replayed")
        result = _take_turn(playing, responses[-1])
        if not result.numbers[DONE]:
            self._playing[episode] = playing
            if len(self._playing) > MAX_KEPT:
                self._playing.popitem(last=False)
        return result

    def _begin(self, row: Row) -> tuple[Environment, str]:
        """Return an environment that has begun an episode, and its prompt as JSON; try again if it fails."""
        wait_s = FIRST_WAIT_S
        for _ in range(NUM_RESETS - 1):
            try:
                environment = self._make()
                return environment, _prompt(environment.reset(row))
            except MemoryError:
                raise
            except Exception as error:  # the user's environment may raise anything
                print(f"reset: {type(error).__name__}: {error}{place_of(error)}")  # a warning shows it
            time.sleep(wait_s)
            wait_s *= 2
        environment = self._make()
        return environment, _prompt(environment.reset(row))


def _take_turn(playing: _Playing, response: str) -> RuleResult:
    answer = playing.environment.step(response)
    if not isinstance(answer, tuple) or len(answer) != len(Step._fields):
        raise TypeError(f"step returns (observation, reward, done), not {shown(answer)}")
    observation, reward, done = answer
    if not is_number(reward):
        raise TypeError(f"the reward of a turn is a finite number (as float32), not {shown(reward)}")
    if hasattr(done, "tolist"):  # of numpy or torch
        done = done.tolist()
    if not isinstance(done, bool):
        raise TypeError(f"done is true or false, a bool, not {shown(done)}")
    text = None if done else _prompt(observation)
    playing.observations.append(text)
    return RuleResult({"score": float(reward), DONE: float(done)}, text)


def _prompt(observation: Observation | None) -> str:
    """Return an observation as JSON. Raises UserError if it is none."""
    for fault in prompt_faults(observation):
        raise UserError(f"an observation is a text or messages: {fault}")
    if isinstance(observation, list) and any(message["role"] == "assistant" for message in observation):
        raise UserError("an observation has a message of the assistant: only the policy speaks for it")
    return json.dumps(observation)
