"""Loads the reward functions that a configuration names, and reads their results. Workers import it: no torch here."""

import hashlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from ctypes import c_float
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from reprlib import Repr
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol

from megarl.platform.secrets import READ_CHARACTERS, beginning
from megarl.rewards import REWARDS, answers_of, reward_of, rule_of
from megarl.rewards import math as math_rule
from megarl.rewards.reasoning_gym import SOURCE_PREFIX
from megarl.rewards.signature import fault_of, missing

RewardFn = Callable[..., Any]
"""f(data_source, solution_str, ground_truth, extra_info) -> a number, or a mapping with `score` and perhaps more."""
Numbers = dict[str, float]
"""`score`, perhaps `acc`, and further numbers that a reward reports of a response."""


class RuleResult(NamedTuple):
    """The result of the rules for a response."""

    numbers: Numbers
    pred: str | None  # the extracted answer, '' if the response has none; None: the rules extract none


DATA_SOURCE, CUSTOM = "data_source", "custom"
MAX_NUMBERS = 16
"""Most numbers besides `score` and `acc` that are kept of a mapping."""
MAX_PRED = 512
"""Most characters of an answer that are kept."""
DIGEST = "SHA-256: "
"""The prefix of a digest in a description of a file."""
_NOT_IN_NAMES = re.compile(r"[^\w./-]", re.ASCII)
_MAX_NAME = 64
_SHOWN_CHARACTERS = 100
_GIANTS = Repr()
_GIANTS.maxstring = _GIANTS.maxother = READ_CHARACTERS


class Callee(Protocol):
    """What workers call: rules, or environments. A dataclass of values that JSON has."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    section: ClassVar[str]  # of the configuration, for messages
    keeper: ClassVar[str]  # the module that keepers run

    def load(self) -> Callable[..., RuleResult]:
        """Return the function to call. Raises ValueError if the user's file does not load."""

    def warm_up(self, data_source: str) -> None:
        """Import what the first call for a row of `data_source` needs."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The functions that make the score of a response."""

    section: ClassVar[str] = "reward_model"
    keeper: ClassVar[str] = "megarl.rewards.keeper"

    path: str | None = None  # the file of the custom function
    name: str = "compute_score"  # its name there
    weights: Mapping[str, float] | None = None  # of the rules that are summed; None: one rule alone

    def load(self) -> Callable[..., RuleResult]:
        """Return the reward, with the arguments of a `RewardFn`.

        Raises ValueError if the custom file does not load or has no such function.
        """
        custom = None if self.path is None else _load_custom(Path(self.path), self.name)
        if self.weights is None:
            alone = custom or _judge_by_data_source
            return lambda **arguments: as_rule_result(alone(**arguments))
        known: dict[str, Any] = {name: partial(_judge, name) for name in REWARDS}
        known |= {DATA_SOURCE: _judge_by_data_source, CUSTOM: custom}
        parts = {name: known[name] for name in self.weights}
        return lambda **arguments: self._sum({name: as_rule_result(part(**arguments)) for name, part in parts.items()})

    def warm_up(self, data_source: str) -> None:
        """Import the modules that built-in rules import at their first call: no response should pay for that."""
        names = {*(self.weights or ()), *([data_source] if self.reads_data_source() else ())}
        with suppress(ImportError):  # the rule itself reports the missing package
            if "math_verify" not in sys.modules and any((rule_of(name) or "").startswith("math") for name in names):
                math_rule.equal("\\frac{1}{2}", "x+1")
            if any(name.startswith(SOURCE_PREFIX) for name in names):
                importlib.import_module("reasoning_gym")

    def reads_data_source(self) -> bool:
        """Return whether the row's data source picks a rule."""
        return self.path is None if self.weights is None else DATA_SOURCE in self.weights

    def _sum(self, parts: Mapping[str, RuleResult]) -> RuleResult:
        assert self.weights is not None
        first = next(iter(parts.values())).numbers
        score = sum(weight * parts[name].numbers["score"] for name, weight in self.weights.items())
        if not is_number(score):
            raise TypeError(f"the weighted sum of the scores is {score}, which is not a finite number in float32")
        numbers = {name: number for part in parts.values() for name, number in part.numbers.items()}
        numbers |= {
            **{name: part.numbers["score"] for name, part in parts.items()},
            "score": score,
            "acc": first.get("acc", first["score"]),
        }
        return RuleResult(numbers, next((part.pred for part in parts.values() if part.pred is not None), None))


def provenance(path: Path, name: str) -> str:
    """Describe a custom function: its name, its file and 12 hex digits of the file's SHA-256."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else "it is not here"
    return f"{name} of {path.absolute()} ({DIGEST}{digest})"


def rule_names() -> list[str]:
    """Return the names that `weights` may have."""
    return [DATA_SOURCE, CUSTOM, *sorted(REWARDS)]


def known_data_source(name: str) -> RewardFn:
    """Return the built-in reward of a data source. Raises ValueError if there is none."""
    reward = reward_of(name)
    if reward is None:
        raise ValueError(
            f"no built-in reward for data source {name!r} (known: {', '.join(sorted(REWARDS))}); "
            "set custom_reward_function.path"
        )
    return reward


def _judge_by_data_source(**arguments: Any) -> Mapping[str, Any]:
    return _judge(arguments["data_source"], **arguments)


def _judge(name: str, /, **arguments: Any) -> Mapping[str, Any]:
    """Return the score of a data source's built-in rule for a response, and the answer that it has judged."""
    answer_in = answers_of(name)
    pred = answer_in(arguments["solution_str"]) if answer_in else None
    return {"score": known_data_source(name)(**arguments), "pred": pred}


def as_rule_result(result: Any) -> RuleResult:
    """Convert the return value of a reward; TypeError as for `as_numbers`. A long answer is cut at its end."""
    pred = result.get("pred") if isinstance(result, Mapping) else None
    answer = beginning(pred, MAX_PRED).encode(errors="replace").decode() if isinstance(pred, str) else None
    return RuleResult(as_numbers(result), answer)


def as_numbers(result: Any) -> Numbers:
    """Return the numbers in the return value of a reward; other values of a mapping are ignored.

    Raises TypeError if the score, or `acc` if given, is not a finite number in float32.
    """
    values = result if isinstance(result, Mapping) else {"score": result}
    if not is_number(values.get("score")) or not is_number(values.get("acc", 0.0)):
        raise TypeError(
            f"a reward returns a finite number or a dict with such a 'score', not {_shown(result)} (as float32)"
        )
    numbers = {name: float(values[name]) for name in ("score", "acc") if name in values}
    for name, number in _others(values):
        if len(numbers) == MAX_NUMBERS + 2:
            break
        numbers.setdefault(name, number)
    return numbers


def _others(values: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(key, str) and is_number(value):
            yield _NOT_IN_NAMES.sub("_", key[:_MAX_NAME]), float(value)


def _shown(result: Any) -> str:
    try:
        return beginning(_GIANTS.repr(result), _SHOWN_CHARACTERS)
    except ValueError:  # Python does not write integers of thousands of digits
        return "an integer of too many digits"


def is_number(value: Any) -> bool:
    """Return whether a value is a number that is finite in float32: scores are float32 on the rank."""
    try:
        return isinstance(value, Real) and math.isfinite(c_float(float(value)).value)
    except OverflowError:  # an integer beyond float64
        return False


def _load_custom(path: Path, name: str) -> RewardFn:
    module = load_module(path, key="custom_reward_function.path")
    reward = getattr(module, name, None)
    if not callable(reward):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ValueError(f"custom_reward_function.name: {missing(path, name, own)}")
    if fault := fault_of(reward, path, name):
        raise ValueError(f"custom_reward_function.name: {fault}")
    loaded: RewardFn = reward
    return loaded


def load_module(path: Path, *, key: str) -> ModuleType:
    """Run a Python file of the user as a module. ValueError if it does not load, naming `key` of the configuration."""
    if not path.is_file():
        raise ValueError(f"{key}: no such file: {path}")
    spec = importlib.util.spec_from_file_location(f"{key.replace('.', '_')}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{key}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class up through its module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything; the message names the file
        raise ValueError(f"{key}: {path} fails to load: {type(error).__name__}: {error}") from error
    return module
