"""The protocol of the rules and environments that workers call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from megarl.sandbox.results import RuleResult

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
    supervisor: ClassVar[str]  # the module that supervisors run

    def load(self) -> GroupReward:
        """Return the function to call. Raises UserError if the user's file does not load."""

    def warm_up(self, data_source: str) -> None:
        """Import what the first call for a row of `data_source` needs."""

    def canaries(self, sample: object) -> Sequence[object]:
        """Return packed arguments like `sample`, of responses that are wrong; none if no response runs in a call."""
