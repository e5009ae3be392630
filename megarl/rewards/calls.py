"""The forms in which a reward is called for several responses: one after another, or as a batch.

`concurrent_calls` has the asynchronous form. In each form a response that fails has an error of its own. An error that
concerns the entire call is raised.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.rewards.signature import ARGUMENTS, BATCH_ARGUMENTS, IDS
from megarl.sandbox.protocol import Arguments, Outcome
from megarl.sandbox.results import as_rule_result, show


@dataclass(frozen=True)
class OneByOne:
    """Calls a function for one response after another. The caller keeps the deadline."""

    function: Callable[..., object]
    names: Sequence[str] = ARGUMENTS  # of the arguments that the function takes

    def __call__(self, samples: Sequence[Arguments], deadline: float) -> Sequence[Outcome]:
        """Return the outcome of each response."""
        outcomes = list[Outcome]()
        for arguments in samples:
            try:
                result = self.function(**{name: arguments[name] for name in self.names})
                outcomes.append(as_rule_result(result))
            except MemoryError:  # the process is no longer sound
                raise
            except Exception as error:  # the user's function may raise anything
                outcomes.append(error)
        return outcomes


class AsBatch:
    """Calls a function that takes the arguments of all responses as lists. The caller keeps the deadline."""

    def __init__(self, function: Callable[..., object], *, takes_ids: bool = False) -> None:
        """`takes_ids`: the function also takes the tokens of the responses."""
        self._function = function
        self._names = dict(zip(BATCH_ARGUMENTS, ARGUMENTS, strict=True)) | ({IDS: IDS} if takes_ids else {})

    def __call__(self, samples: Sequence[Arguments], deadline: float) -> Sequence[Outcome]:
        """Return the outcome of each response."""
        columns = {many: [arguments[one] for arguments in samples] for many, one in self._names.items()}
        found = self._function(**columns)
        if hasattr(found, "tolist"):  # arrays of numpy and tensors
            found = found.tolist()
        if not isinstance(found, list | tuple):
            fault = f"a batch function returns a list with the score of each response, not {show(found)}"
            return [TypeError(fault)] * len(samples)
        if len(found) != len(samples):
            fault = f"a batch function returned {len(found)} scores for {len(samples)} responses"
            return [ValueError(fault)] * len(samples)
        return [_converted(value) for value in found]


def _converted(value: object) -> Outcome:
    try:
        return as_rule_result(value)
    except MemoryError:
        raise
    except Exception as error:  # a mapping of the user may raise anything
        return error
