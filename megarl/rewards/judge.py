"""A language model behind an endpoint of OpenAI's form that judges responses: `reward_model.judge`.

A request that fails is sent again while the time of the response lasts. A verdict is the last number that the pattern
finds in the reply; without one in the range the response has no score.
"""

import asyncio
import hashlib
import json
import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from megarl.platform.files import explained, write_whole
from megarl.rewards.results import show

FIRST_WAIT_S = 0.5
"""Mean seconds before the second attempt; each later wait is twice as long."""
KEY = "reward_model.judge"
_PASSING = (408, 409, 425, 429)  # and all of 500 and above: the same request may succeed later


class VerdictError(Exception):
    """A response that the judge gave no score, with the reason."""


class _PassingError(Exception):
    """A failed attempt that may succeed later, and the seconds that the server asks to wait."""

    def __init__(self, detail: str, wait_s: float = 0.0) -> None:
        super().__init__(detail)
        self.wait_s = wait_s


@dataclass(kw_only=True)
class Judge:
    """Asks for the verdict on a response. The fields are those of `JudgeSection`."""

    url: str
    model: str
    template: str
    pattern: str
    lowest: float
    highest: float
    api_key_variable: str | None
    request: Mapping[str, Any]
    attempt_s: float
    num_attempts: int
    cache: str | None

    async def __call__(self, **arguments: Any) -> float:
        """Return the score of a response. Raises VerdictError if there is none after all attempts."""
        try:
            question = self.template.format(**arguments)
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise VerdictError(f"{KEY}.template does not fit the row: {type(error).__name__}: {error}") from None
        body = {
            "temperature": 0.0,
            **self.request,
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
        }
        kept = self._kept(body)
        reply = await asyncio.to_thread(_read, kept) if kept else None
        if reply is not None:
            return self.verdict_in(reply)
        reply = await self._ask(body)
        verdict = self.verdict_in(reply)
        if kept:
            await asyncio.to_thread(_keep, kept, reply)
        return verdict

    def verdict_in(self, reply: str) -> float:
        """Return the number in a reply. Raises VerdictError if there is none from `lowest` to `highest`."""
        found = re.findall(self.pattern, reply)
        text = found[-1] if found else None
        try:
            number = float(text)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise VerdictError(f"the judge gave no number that {KEY}.pattern finds: {show(reply)}") from None
        if not self.lowest <= number <= self.highest:  # NaN is in no range
            raise VerdictError(f"the judge's {number:g} is not from {self.lowest:g} to {self.highest:g}: {show(reply)}")
        return number

    async def _ask(self, body: Mapping[str, Any]) -> str:
        """Return the text of the reply. Raises VerdictError after the last attempt."""
        wait_s = FIRST_WAIT_S
        for attempt in range(1, self.num_attempts + 1):
            try:
                return await self._attempt(body)
            except _PassingError as error:
                if attempt == self.num_attempts:
                    raise VerdictError(f"the judge failed {attempt} times, at last: {error}") from None
                print(f"attempt {attempt}: {error}")  # a warning shows it if the time is over before the next
                await asyncio.sleep(max(error.wait_s, wait_s * random.uniform(0.5, 1.5)))  # noqa: S311 - no secret
                wait_s *= 2
        raise AssertionError("no attempt")

    async def _attempt(self, body: Mapping[str, Any]) -> str:
        try:
            async with asyncio.timeout(self.attempt_s):
                reply = await self._client.post(f"{self.url.rstrip('/')}/chat/completions", json=body)
        except (TimeoutError, httpx.TimeoutException):
            raise _PassingError(f"no reply in {KEY}.attempt_s={self.attempt_s:g}") from None
        except httpx.TransportError as error:
            raise _PassingError(f"{type(error).__name__}: {error}") from None
        said = f"status {reply.status_code}: {show(reply.text)}"
        if reply.status_code in _PASSING or reply.status_code >= 500:
            raise _PassingError(said, _asked_wait_s(reply))
        if not reply.is_success:
            raise VerdictError(f"the judge at {KEY}.url refuses the request: {said}")
        try:
            content = reply.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            raise _PassingError(f"the reply is no chat completion: {show(reply.text)}") from None
        if not isinstance(content, str):
            raise _PassingError(f"the reply has no text: {show(reply.text)}")
        return content

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        """The connections of this process; the first response opens them, in the event loop of all."""
        key = os.environ.get(self.api_key_variable, "") if self.api_key_variable else ""
        limits = httpx.Limits(max_connections=None)  # the number of responses in a process is limited
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(headers=headers, timeout=self.attempt_s, limits=limits)

    def _kept(self, body: Mapping[str, Any]) -> Path | None:
        """Return the file that holds, or will hold, the reply to a request; None without a cache."""
        if self.cache is None:
            return None
        digest = hashlib.sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest()
        return Path(self.cache).expanduser() / digest[:2] / f"{digest}.json"


def _asked_wait_s(reply: httpx.Response) -> float:
    """Return the seconds of the header Retry-After; 0 if it is absent or a date."""
    text = reply.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0


def _read(path: Path) -> str | None:
    """Return a kept reply; None if there is none or its file is damaged."""
    try:
        reply = json.loads(path.read_bytes())["reply"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return reply if isinstance(reply, str) else None


def _keep(path: Path, reply: str) -> None:
    """Write a reply, complete or not at all, also if other processes write the same."""
    with explained(f"{KEY}.cache={path.parent.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{uuid4().hex}")
        write_whole(own, json.dumps({"reply": reply}).encode())
        own.replace(path)
