"""The built-in rules, by data source, and the answer that each rule extracts from a response."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from megarl.platform.errors import UserError
from megarl.rewards import countdown, format, gsm8k, knights_knaves, math, math_equal, multiply, reasoning_gym
from megarl.rewards.calls import OneByOne
from megarl.rewards.signature import DATA_SOURCE


@dataclass(frozen=True, kw_only=True)
class BuiltInRule:
    """A built-in rule."""

    score: Callable[..., float]
    """(data_source, response, ground truth, extra_info) -> score."""
    right_answer: Callable[[object], str | None]
    """Ground truth -> a response that must score 1.0; None: none is known. UserError if no response is right."""
    answer: Callable[[str], str] | None = None
    """Response -> its answer, equal for equivalent responses, '' without one; None: the rule extracts none."""
    sources: tuple[str, ...] = ()
    """Further data sources, as files made for other trainers name them."""
    prefixes: tuple[str, ...] = ()
    """Beginnings of further data sources; names have precedence."""


def _rule(module: Any, **sources: tuple[str, ...]) -> BuiltInRule:
    return BuiltInRule(score=module.compute_score, answer=module.answer_in, right_answer=module.right_answer, **sources)


_GSM8K = _rule(gsm8k)
_GSM8K_FLEXIBLE = BuiltInRule(
    score=gsm8k.compute_score_flexible, answer=gsm8k.answer_in_flexible, right_answer=gsm8k.right_answer
)
RULES = {
    "countdown": _rule(countdown, sources=("Jiayi-Pan/Countdown-Tasks-3to4",), prefixes=("countdown",)),
    "countdown/bare": BuiltInRule(
        score=countdown.compute_score_bare, answer=countdown.answer_in_bare, right_answer=countdown.right_answer
    ),
    "format": BuiltInRule(score=format.compute_score, right_answer=format.right_answer),
    "gsm8k": _GSM8K,
    "gsm8k/flexible": _GSM8K_FLEXIBLE,
    "knights_knaves": _rule(knights_knaves),
    "math": _rule(
        math,
        sources=(
            "DigitalLearningGmbH/MATH-lighteval",
            "HuggingFaceH4/MATH-500",
            "lighteval/MATH",
            "numina_amc_aime",
            "numina_aops_forum",
            "numina_cn_k12",
            "numina_olympiads",
            "numina_synthetic_amc",
            "numina_synthetic_math",
        ),
    ),
    "math_dapo": BuiltInRule(
        score=math.compute_score_dapo,
        answer=math.answer_in_dapo,
        right_answer=math.right_answer,
        sources=("math_dapo_reasoning",),
        prefixes=("aime",),
    ),
    "multiply": _rule(multiply, prefixes=("arithmetic", "multiply", "yolo/arithmetic", "yolo/multiply")),
    "openai/gsm8k": _GSM8K,
    "svamp": _GSM8K,
    "svamp/flexible": _GSM8K_FLEXIBLE,
}
SOURCES = {source: name for name, rule in RULES.items() for source in rule.sources}
PREFIXES = {prefix: name for name, rule in RULES.items() for prefix in rule.prefixes}
_REASONING_GYM = _rule(reasoning_gym)


def name_of_rule(data_source: str) -> str | None:
    """Return the name in `RULES` of the rule for the rows of `data_source`; None if there is none."""
    if data_source in RULES:
        return data_source
    by_prefix = (name for prefix, name in PREFIXES.items() if data_source.startswith(prefix))
    return SOURCES.get(data_source) or next(by_prefix, None)


def rule_of(data_source: str) -> BuiltInRule | None:
    """Return the rule for the rows of `data_source`; None if there is none."""
    if data_source.startswith(reasoning_gym.SOURCE_PREFIX):
        return _REASONING_GYM
    return RULES.get(name_of_rule(data_source) or "")


def extracts_answers(data_source: str) -> bool:
    """Return whether there is a rule for the rows of `data_source` that extracts the answers of responses."""
    rule = rule_of(data_source)
    return rule is not None and rule.answer is not None


def known_data_source(name: str) -> BuiltInRule:
    """Return the built-in rule of a data source. Raises UserError if there is none."""
    rule = rule_of(name)
    if rule is None:
        raise UserError(
            f"no built-in reward for data source {name!r} (known: {', '.join(sorted(RULES))}); "
            "set custom_reward_function.path"
        )
    return rule


def reward_named(name: str) -> OneByOne:
    """Return the reward of a name in `reward_model.weights`: that of a rule, or of the rule of each row."""
    return OneByOne(_judge_by_data_source if name == DATA_SOURCE else partial(_judge, name))


def warm_up(names: Iterable[str]) -> None:
    """Import the modules that the rules of data sources import at their first call: no response should pay for that."""
    names = list(names)
    with suppress(ImportError):  # the rule itself reports the missing package
        has_math = any((name_of_rule(name) or "").startswith("math") for name in names)
        if has_math and "math_verify" not in sys.modules:
            math_equal.equal("\\frac{1}{2}", "x+1")
        if any(name.startswith(reasoning_gym.SOURCE_PREFIX) for name in names):
            importlib.import_module("reasoning_gym")


def _judge_by_data_source(**arguments: Any) -> Mapping[str, object]:
    return _judge(arguments["data_source"], **arguments)


def _judge(name: str, /, **arguments: Any) -> Mapping[str, object]:
    """Return the score of a data source's built-in rule for a response, and the answer that it has judged."""
    rule = known_data_source(name)
    pred = rule.answer(arguments["solution_str"]) if rule.answer else None
    return {"score": rule.score(**arguments), "pred": pred}
