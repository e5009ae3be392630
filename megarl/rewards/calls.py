"""The forms in which a reward is called for several responses: one after another, concurrently, or as a batch.

In each form a response that fails has an error of its own. An error that concerns the entire call is raised.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from megarl.rewards.results import RuleResult, as_rule_result, show
from megarl.rewards.signature import ARGUMENTS, BATCH_ARGUMENTS, IDS

Arguments = Mapping[str, Any]
"""Those of a reward for one response, the text of its prompt as `prompt`, and `solution_ids` if the reward takes it."""
Outcome = RuleResult | Exception
"""The result of a response, or the reason why it has none."""
GroupReward = Callable[[Sequence[Arguments], float], Sequence[Outcome]]
"""f(arguments of each response, deadline by `time.monotonic`) -> the outcome of each response."""


class TooLateError(Exception):
    """A response that has used its time."""


class Callee(Protocol):
    """Rules or environments, which workers call. A dataclass of values that JSON has."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    section: ClassVar[str]  # of the configuration, for messages
    keeper: ClassVar[str]  # the module that keepers run

    def load(self) -> GroupReward:
        """Return the function to call. Raises UserError if the user's file does not load."""

    def warm_up(self, data_source: str) -> None:
        """Import what the first call for a row of `data_source` needs."""

    def canaries(self, sample: Any) -> Sequence[Any]:
        """Return packed arguments like `sample`, of responses that are wrong; none if no response runs in a call."""


def each(judge: Callable[..., RuleResult]) -> GroupReward:
    """Call a function with one set of arguments after another. The caller keeps the deadline."""
    return lambda samples, deadline: [_attempt(lambda own: judge(**own), arguments) for arguments in samples]


def one_by_one(reward: Callable[..., Any], *, takes_ids: bool = False) -> GroupReward:
    """Call a reward for one response after another. The caller keeps the deadline."""
    called = own_arguments(reward, takes_ids=takes_ids)
    return each(lambda **arguments: as_rule_result(called(**arguments)))


def concurrently(reward: Callable[..., Any]) -> GroupReward:
    """Call an asynchronous function for all responses at once, in an event loop that lasts as long as the process."""
    runner = asyncio.Runner()

    async def judge(arguments: Arguments, deadline: float) -> Outcome:
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                return as_rule_result(await reward(**arguments))
        except MemoryError:
            raise
        except Exception as error:  # the user's function may raise anything
            return TooLateError() if isinstance(error, TimeoutError) and limit.expired() else error

    async def judge_all(samples: Sequence[Arguments], deadline: float) -> Sequence[Outcome]:
        return await asyncio.gather(*(judge(arguments, deadline) for arguments in samples))

    return lambda samples, deadline: runner.run(judge_all(samples, deadline))


def own_arguments(reward: Callable[..., Any], *, takes_ids: bool = False) -> Callable[..., Any]:
    """Leave out what a function of a user does not receive."""
    names = (*ARGUMENTS, IDS) if takes_ids else ARGUMENTS
    return lambda **arguments: reward(**{name: arguments[name] for name in names})


def as_batch(reward: Callable[..., Any], *, is_async: bool, takes_ids: bool = False) -> GroupReward:
    """Call a function that takes the arguments of all responses as lists. The caller keeps the deadline."""
    runner = asyncio.Runner() if is_async else None
    names = dict(zip(BATCH_ARGUMENTS, ARGUMENTS, strict=True)) | ({IDS: IDS} if takes_ids else {})

    def judge(samples: Sequence[Arguments], deadline: float) -> Sequence[Outcome]:
        columns = {many: [arguments[one] for arguments in samples] for many, one in names.items()}
        found = runner.run(reward(**columns)) if runner else reward(**columns)
        found = found.tolist() if hasattr(found, "tolist") else found  # arrays of numpy and tensors
        if not isinstance(found, list | tuple):
            fault = f"a batch function returns a list with the score of each response, not {show(found)}"
            return [TypeError(fault)] * len(samples)
        if len(found) != len(samples):
            fault = f"a batch function returned {len(found)} scores for {len(samples)} responses"
            return [ValueError(fault)] * len(samples)
        return [_attempt(as_rule_result, value) for value in found]

    return judge


def _attempt(judge: Callable[[Any], RuleResult], value: Any) -> Outcome:
    try:
        return judge(value)
    except MemoryError:  # the process is no longer sound
        raise
    except Exception as error:  # the user's function may raise anything
        return error
