"""Requests to a server that may be away, busy, slow or wrong: each has a limit, and passing faults are tried again."""

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import httpx

from megarl.sandbox.results import show

FIRST_WAIT_S = 0.5
"""Mean seconds before the second attempt; each later wait is twice as long."""
MAX_REPLY_BYTES = 1 << 22
"""Most bytes of a reply; a longer one is not read to its end."""
_PASSING = (408, 409, 425, 429)  # and all of 500 and above: the same request may succeed later
T = TypeVar("T")


class ServerError(Exception):
    """A server that refuses a request, or failed at all attempts."""


class PassingError(Exception):
    """A failed attempt that may succeed later, and the seconds that the server asks to wait."""

    def __init__(self, detail: str, wait_s: float = 0.0) -> None:
        super().__init__(detail)
        self.wait_s = wait_s


@dataclass(kw_only=True)
class Server:
    """A server that is asked with JSON. Used in one event loop."""

    name: str  # for messages
    key: str  # of the configuration, that has the limits
    attempt_s: float  # most seconds of one request
    num_attempts: int
    api_key_variable: str | None  # environment variable with the server's key; None: it needs none

    async def patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what an attempt returns, the first that is no PassingError. ServerError after the last."""
        wait_s = FIRST_WAIT_S
        for number in range(1, self.num_attempts + 1):
            try:
                return await attempt()
            except PassingError as error:
                if number == self.num_attempts:
                    raise ServerError(f"{self.name} failed {number} times, at last: {error}") from None
                print(f"attempt {number}: {error}")  # a warning shows it if the time is over before the next
                await asyncio.sleep(max(error.wait_s, wait_s * random.uniform(0.5, 1.5)))  # noqa: S311 - no secret
                wait_s *= 2
        raise AssertionError("no attempt")

    async def post(self, url: str, body: Mapping[str, object]) -> Any:
        """Return the JSON of the reply to one request.

        Raises:
            PassingError: there is no such reply, but there may be one later.
            ServerError: the server refuses the request, or HTTP or JSON cannot express it.
        """
        try:
            async with asyncio.timeout(self.attempt_s), self._client.stream("POST", url, json=body) as reply:
                content = await _read(reply)
        except (TimeoutError, httpx.TimeoutException):
            raise PassingError(f"no reply in {self.key}.attempt_s={self.attempt_s:g}") from None
        except httpx.RequestError as error:  # a lost connection, or a reply that is compressed wrongly
            raise PassingError(f"{type(error).__name__}: {error}") from None
        except (httpx.InvalidURL, ValueError) as error:  # also a key, half a character or a number that is not finite
            raise ServerError(f"{self.name} cannot be asked: {error}") from None
        text = content.decode(errors="replace")
        description = f"status {reply.status_code}: {show(text)}"
        if reply.status_code in _PASSING or reply.status_code >= 500:
            raise PassingError(description, _asked_wait_s(reply))
        if not reply.is_success:
            raise ServerError(f"{self.name} at {self.key}.url refuses the request: {description}")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise PassingError(f"the reply is no JSON: {show(text)}") from None

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        """The connections of this process; the first request opens them, in the event loop of all."""
        key = os.environ.get(self.api_key_variable, "") if self.api_key_variable else ""
        limits = httpx.Limits(max_connections=None)  # the number of requests at once is limited elsewhere
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(headers=headers, timeout=self.attempt_s, limits=limits)


async def _read(reply: httpx.Response) -> bytes:
    content = bytearray()
    async for piece in reply.aiter_bytes():
        content += piece
        if len(content) > MAX_REPLY_BYTES:
            raise PassingError(f"the reply has more than {MAX_REPLY_BYTES} bytes")
    return bytes(content)


def _asked_wait_s(reply: httpx.Response) -> float:
    """Return the seconds of the header Retry-After; 0 if it is absent or a date."""
    text = reply.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0
