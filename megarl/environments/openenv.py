"""A client of environments that a server plays by the HTTP protocol of OpenEnv: `POST /reset` and `POST /step`.

An episode is reset with the seed of its row, so all episodes of a row begin alike. The server must distinguish episodes
by the `episode_id` of each request. A request that fails is not sent again, because the server may have taken the turn:
the episode begins anew under another id, and its earlier turns are played again.
"""

import asyncio
import json
from collections.abc import Coroutine, Mapping
from functools import cache
from typing import Any
from uuid import uuid4

from megarl.environments.protocol import Observation, Row, Step
from megarl.platform.errors import UserError
from megarl.rewards.http import PassingError, Server
from megarl.sandbox.results import is_number, show

KEY = "environment.kwargs"


class OpenEnv:
    """An episode on a server."""

    def __init__(
        self,
        *,
        url: str,
        action: str = "message",
        observation: str = "message",
        reset: Mapping[str, str] | None = None,
        attempt_s: float = 5.0,
        num_attempts: int = 3,
        api_key_variable: str | None = None,
    ) -> None:
        """Name the server and the fields that it reads and writes.

        Args:
            url: base of the server, such as http://host:8000.
            action: the field of an action that has the text of a turn.
            observation: the field of an observation that the policy reads: a text or messages.
            reset: further fields of the reset, and where each is found in the row: `prompt`, `ground_truth`,
                `data_source`, `index`, or a key of `extra_info`.
            attempt_s: seconds that one request may take; `environment.timeout_s` limits all requests for a turn.
            num_attempts: most attempts to play a turn.
            api_key_variable: environment variable that holds the server's key.
        """
        self._url = url.rstrip("/")
        self._action = action
        self._observation = observation
        self._fields = reset or {}
        self._server = _server(attempt_s, num_attempts, api_key_variable)
        self._start: Mapping[str, object] = {}
        self._episode = ""
        self._turns = list[tuple[str, Step]]()

    def reset(self, row: Row) -> Observation:
        """Begin an episode: the observation of the server's reset, or the row's prompt if the server says none."""
        known = {
            **row.extra_info,
            "prompt": row.prompt,
            "ground_truth": row.ground_truth,
            "data_source": row.data_source,
            "index": row.index,
        }
        missing = [place for place in self._fields.values() if place not in known]
        if missing:
            raise UserError(f"{KEY}.reset names {', '.join(missing)}, which the row does not have")
        self._start = {"seed": row.seed, **{name: known[place] for name, place in self._fields.items()}}
        first = _run(self._server.patiently(self._begin))
        return first.observation or row.prompt

    def step(self, response: str) -> Step:
        """Let the server answer a turn."""

        async def attempt() -> Step:
            try:
                if not self._episode:
                    await self._begin()
                    for generation, before in self._turns:
                        if await self._take(generation) != before:
                            raise RuntimeError("the server is not deterministic: it answers a turn otherwise later")
                return await self._take(response)
            except PassingError:
                self._episode = ""
                raise

        answer = _run(self._server.patiently(attempt))
        self._turns.append((response, answer))
        return answer

    async def _begin(self) -> Step:
        """Begin the episode under a new id."""
        episode = str(uuid4())
        first = await self._post("reset", {**self._start, "episode_id": episode})
        self._episode = episode
        return first

    async def _take(self, response: str) -> Step:
        body = {"action": {self._action: response}, "episode_id": self._episode, "timeout_s": self._server.attempt_s}
        return await self._post("step", body)

    async def _post(self, path: str, body: Mapping[str, object]) -> Step:
        """Return the answer to a request. Raises PassingError if it is none of the protocol."""
        reply = await self._server.post(f"{self._url}/{path}", body)
        match reply:
            case {"observation": dict(observation), "reward": reward, "done": bool(done)}:
                if reward is None or is_number(reward):
                    return Step(observation.get(self._observation), float(reward or 0.0), done=done)
        raise PassingError(f"the reply to /{path} has no observation, reward and done: {show(json.dumps(reply))}")


@cache
def _loop() -> asyncio.Runner:
    """Return the event loop of this process, in which its connections live."""
    return asyncio.Runner()


def _run(coroutine: Coroutine[Any, Any, Step]) -> Step:
    return _loop().run(coroutine)


@cache
def _server(attempt_s: float, num_attempts: int, api_key_variable: str | None) -> Server:
    """Return the server, with connections that all episodes of this process share."""
    return Server(
        name="the environment's server",
        key=KEY,
        attempt_s=attempt_s,
        num_attempts=num_attempts,
        api_key_variable=api_key_variable,
    )
