"""Asynchronous rewards, which are called in an event loop.

Processes of other rewards do not import this module: the fork for a response would copy asyncio too.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from megarl.rewards.signature import ARGUMENTS
from megarl.sandbox.protocol import Arguments, Outcome, TooLateError
from megarl.sandbox.results import as_rule_result


class Concurrently:
    """Calls an asynchronous function for all responses at once, in an event loop that lasts as long as the process."""

    def __init__(self, function: Callable[..., Awaitable[object]], names: Sequence[str] = ARGUMENTS) -> None:
        """`names` are those of the arguments that the function takes."""
        self._function = function
        self._names = names
        self._runner = asyncio.Runner()

    def __call__(self, samples: Sequence[Arguments], deadline: float) -> Sequence[Outcome]:
        """Return the outcome of each response, `TooLateError` after the deadline."""
        return self._runner.run(self._call(samples, deadline))

    async def _call(self, samples: Sequence[Arguments], deadline: float) -> Sequence[Outcome]:
        return await asyncio.gather(*(self._call_one(arguments, deadline) for arguments in samples))

    async def _call_one(self, arguments: Arguments, deadline: float) -> Outcome:
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                return as_rule_result(await self._function(**{name: arguments[name] for name in self._names}))
        except MemoryError:
            raise
        except Exception as error:  # the user's function may raise anything
            return TooLateError() if isinstance(error, TimeoutError) and limit.expired() else error


def in_event_loop(function: Callable[..., Coroutine[Any, Any, object]]) -> Callable[..., object]:
    """Return a function that awaits `function`, in an event loop that lasts as long as the process."""
    runner = asyncio.Runner()

    def call(**arguments: object) -> object:
        return runner.run(function(**arguments))

    return call
