"""Puts the rules of a configuration together. Workers import it: no torch here.

The process of a custom function does not import the built-in rules: the fork for each response would copy them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from megarl.rewards.custom import check_custom, load_custom
from megarl.rewards.signature import ARGUMENTS, DATA_SOURCE, IDS, PROMPT, Form
from megarl.sandbox.protocol import GroupReward, Outcome
from megarl.sandbox.results import RuleResult, is_number
from megarl.sandbox.wire import with_values

WRONG = ("This text is no response to the question.", "")
CUSTOM = "custom"
JUDGE = "judge"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules that make the score of a response."""

    section: ClassVar[str] = "reward_model"
    supervisor: ClassVar[str] = "megarl.rewards.supervisor"

    path: str | None = None  # the file of the custom function
    name: str = "compute_score"  # its name there
    kwargs: Mapping[str, object] = field(default_factory=dict)  # its further arguments
    judge: Mapping[str, Any] | None = None  # the fields of a `Judge`
    weights: Mapping[str, float] | None = None  # of the rules that are summed; None: one rule alone

    def check(self) -> Form:
        """Run the custom file, and return the form of its function.

        Raises UserError if the file does not load, or has no such function.
        """
        form = check_custom(Path(self.path), self.name, self.kwargs) if self.path else Form()
        return replace(form, is_async=form.is_async or self.judge is not None)

    def load(self) -> GroupReward:
        """Return the reward. Raises UserError as `check` does, and if the constructor of a class fails."""
        known = dict[str, GroupReward]()
        if self.path:
            known[CUSTOM] = load_custom(Path(self.path), self.name, self.kwargs)
        if self.judge:
            from megarl.rewards.concurrent_calls import Concurrently
            from megarl.rewards.judge import Judge  # imports httpx

            known[JUDGE] = Concurrently(Judge(**self.judge), (*ARGUMENTS, PROMPT))
        if self.weights is None and known:
            return known[CUSTOM if self.path else JUDGE]
        from megarl.rewards import built_in

        if self.weights is None:
            return built_in.reward_named(DATA_SOURCE)
        parts = {name: known.get(name) or built_in.reward_named(name) for name in self.weights}

        def judge(samples: Sequence[Mapping[str, object]], deadline: float) -> list[Outcome]:
            scored_by_rule = {name: part(samples, deadline) for name, part in parts.items()}
            return [self._sum({name: scored_by_rule[name][place] for name in parts}) for place in range(len(samples))]

        return judge

    def warm_up(self, data_source: str) -> None:
        """Import the modules that built-in rules import at their first call: no response should pay for that."""
        names = set(self.weights or ())
        if self.reads_data_source():
            names.add(data_source)
        if names:
            from megarl.rewards import built_in

            built_in.warm_up(names)

    def canaries(self, sample: Any) -> list[object]:
        """Return the arguments of wrong responses to the row of `sample`; none if the custom function is not called.

        A judge is not asked: that may cost money.
        """
        if self.path is None or self.judge:
            return []
        ids: dict[str, object] = {IDS: []} if IDS in dict(sample["dict"]) else {}
        return [with_values(sample, solution_str=text, **ids) for text in WRONG]

    def reads_data_source(self) -> bool:
        """Return whether the row's data source picks a rule."""
        if self.weights is None:
            return not self.path and not self.judge
        return DATA_SOURCE in self.weights

    def _sum(self, parts: Mapping[str, Outcome]) -> Outcome:
        """Return the weighted sum for a response, or the first error of its parts."""
        assert self.weights is not None
        found = dict[str, RuleResult]()
        for name, part in parts.items():
            if isinstance(part, Exception):
                return part
            found[name] = part
        first = next(iter(found.values())).numbers
        score = sum(weight * found[name].numbers["score"] for name, weight in self.weights.items())
        if not is_number(score):
            return TypeError(f"the weighted sum of the scores is {score}, which is not a finite number in float32")
        numbers = {name: number for part in found.values() for name, number in part.numbers.items()}
        numbers |= {
            **{name: part.numbers["score"] for name, part in found.items()},
            "score": score,
            "acc": first.get("acc", first["score"]),
        }
        preds = (part.pred for part in found.values() if part.pred is not None)
        return RuleResult(numbers, next(preds, None))
