"""Rules that are tried on ground truths: the right response must be paid, and an empty response must not.

Runs as `python -m megarl.rewards.self_test SOCKET PARENT`, started by `megarl.sandbox.pool`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from megarl.platform.errors import UserError
from megarl.rewards import math
from megarl.rewards.built_in import known_data_source, name_of_rule
from megarl.rewards.calls import OneByOne
from megarl.rewards.reasoning_gym import SOURCE_PREFIX
from megarl.rewards.rules import Rules
from megarl.sandbox.protocol import GroupReward
from megarl.sandbox.supervisor import main

AS_TEXT = "as_text"
"""The number of a result that is 1.0 if only the same words equal the ground truth."""


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """Calls the rule that the data source names, with the right response to the ground truth of a row."""

    section: ClassVar[str] = "reward_model"
    supervisor: ClassVar[str] = "megarl.rewards.self_test"

    def load(self) -> GroupReward:
        """Return the function to call."""
        return OneByOne(try_truth)

    def warm_up(self, data_source: str) -> None:
        """Import what the first call for a row of `data_source` needs."""
        Rules().warm_up(data_source)

    def canaries(self, sample: object) -> Sequence[object]:
        """Return nothing: no response runs in a rule."""
        return ()


def try_truth(
    *, data_source: str, ground_truth: object, extra_info: Mapping[str, object] | None, solution_str: str = ""
) -> Mapping[str, object]:
    """Return the score of the right response, which is `pred`; 1.0 if the right response is not known.

    Raises UserError if the rule cannot read the ground truth, or pays for `solution_str`, which is empty.
    """
    rule = known_data_source(data_source)
    right = rule.right_answer(ground_truth)
    if right is None:
        return {"score": 1.0}
    if rule.score(data_source, solution_str, ground_truth, extra_info) >= 1.0:
        raise UserError("the rule pays for an empty response")
    score = rule.score(data_source, right, ground_truth, extra_info)
    if data_source.startswith(SOURCE_PREFIX):
        score = float(score > 0.0)  # some tasks pay a part for their own answer
    is_text = (name_of_rule(data_source) or "").startswith("math") and math.reads_as_text(ground_truth)
    return {"score": score, "pred": right, AS_TEXT: float(is_text)}


if __name__ == "__main__":
    main(kind=SelfTest)
